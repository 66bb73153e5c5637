"""① Draft: guesses how sequences continue. There is one file per kind of drafter, all behind `base.Drafter`."""

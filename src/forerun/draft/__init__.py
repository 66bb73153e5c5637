"""① Draft: guess how sequences continue. One file per kind of drafter, all behind `base.Drafter`."""

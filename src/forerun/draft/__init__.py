"""① Draft: guesses how sequences continue. One file per kind, behind `base.Drafter`; trained heads are in `heads/`."""

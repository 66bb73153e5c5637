"""① Draft: guesses how sequences continue, behind the protocol `base.Drafter`.

Drafters that copy text are in `text/`, models in `model/`, those with other vocabularies in `vocab/`, those made of
other drafters in `many/`, and trained heads in the package `heads/`.
"""

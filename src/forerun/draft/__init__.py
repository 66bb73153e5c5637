"""① Draft: drafters, which predict how sequences continue, behind the protocol `base.Drafter`.

Drafters that copy text are in `text/`, draft models in `model/`, draft models with another tokenizer in `vocab/`,
drafters made of other drafters in `many/`, and trained heads in the package `heads/`.
"""

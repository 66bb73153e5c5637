"""Converting drafters between the layouts that trainers and engines publish them in."""

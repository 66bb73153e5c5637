"""Training of drafters: the target writes, its law and its states teach, and held-out answers judge."""

"""Several engines behind one server: replicas of one model, requests that find the replica which knows their beginning,
and answers that go on where a replica was lost."""

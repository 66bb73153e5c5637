"""Several engines (replicas of one model) behind one server, with prefix-aware routing and failover."""

"""Real Postgres and NATS from wheels, started and stopped by `up`."""

from tests.servers import bus, database, log, nats_server, owner_database, plane, postgres_server, server_directory

__all__ = ["bus", "database", "log", "nats_server", "owner_database", "plane", "postgres_server", "server_directory"]

"""Alembic migrations of the tenant store, run when it is opened."""

"""The record on disk: SQLite by SQLAlchemy. The only home of sqlalchemy and alembic."""

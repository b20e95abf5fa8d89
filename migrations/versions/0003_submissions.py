"""Idempotency keys of submissions, so that one can be repeated after a lost answer."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "submissions",
        sa.Column("uid", sa.Integer(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("job", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name=op.f("fk_submissions_job")),
        sa.PrimaryKeyConstraint("uid", "key", name=op.f("pk_submissions")),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_submissions_job", "submissions", ["job"])

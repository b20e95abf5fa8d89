"""Jobs that are tried again after they have failed.

Jobs on record are not.
"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_NONE = sa.text("0")


def upgrade() -> None:
    for column in (
        sa.Column("retries", sa.Integer(), nullable=False, server_default=_NONE),
        sa.Column("retry_on", sa.String()),
        sa.Column("retry_delay_us", sa.Integer()),
        sa.Column("retried", sa.Integer(), nullable=False, server_default=_NONE),
    ):
        op.add_column("jobs", column)

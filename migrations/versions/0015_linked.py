"""Claims for GPUs that are linked by NVLink; jobs on record have none."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    linked = sa.Column("linked", sa.Boolean(), nullable=False, server_default=sa.text("0"))
    op.add_column("jobs", linked)

"""Give the package the addresses of the project, and a description with links that work there.

The README links to files of the repository. A registry renders it elsewhere, so these links get the
project's public address. While there is none, they become plain text, and pictures are left out.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")
"""A link, or with the mark a picture, to a file of the repository."""


class Published(MetadataHookInterface):
    """Adds what depends on the place where the project is published."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the readme, and the URLs if the project has a public address."""
        repository = self.config["repository"].rstrip("/")
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        rendered = description(text, repository, f"v{metadata['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": rendered}
        metadata["urls"] = (
            {
                "Source": repository,
                "Changelog": f"{repository}/blob/main/CHANGELOG.md",
                "Documentation": f"{repository}/tree/main/docs",
            }
            if repository
            else {}
        )


def description(readme: str, repository: str, tag: str) -> str:
    """Point the links of a README to a tag of a repository; without one, remove them."""

    def link(found: re.Match[str]) -> str:
        picture, text, path = found.groups()
        if not repository:
            return "" if picture else text
        return f"{picture}[{text}]({repository}/{'raw' if picture else 'blob'}/{tag}/{path})"

    return _LINK.sub(link, readme)

"""The manual pages that the Debian package has."""

import re
import subprocess
import sys
from pathlib import Path

from gpulease.cli.verbs import VERBS, options_of_verb

ROOT = Path(__file__).parents[2]
REQUEST = re.compile(r"\.(TH|SH|TP|B|PP|nf|fi|br)\b")


def test_each_program_and_verb_has_a_page_with_all_of_its_options(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "docs/man.py", tmp_path], check=True)
    pages = {page.name: page.read_text().replace("\\-", "-") for page in tmp_path.iterdir()}
    assert {"gpulease.1", "gpuleased.8", "gpulease-setup.8", "gpulease-web.8"} <= pages.keys()
    for verb in VERBS:
        page = pages[f"gpulease-{verb}.1"]
        assert f"gpulease-{verb}(1)" in pages["gpulease.1"]
        for option in options_of_verb(verb).values():
            assert re.search(rf"^\.B .*{option.long}\b", page, re.MULTILINE), (verb, option.long)
    assert "--restrict-users" in pages["gpulease-setup.8"]
    assert "\n.B default_memory\n" in pages["gpulease.toml.5"]
    for name, page in pages.items():
        wrong = [line for line in page.splitlines() if line[:1] in (".", "'")]
        assert not [line for line in wrong if not REQUEST.match(line)], name

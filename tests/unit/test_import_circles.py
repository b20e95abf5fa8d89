"""No files of gpulease import each other in a circle, also not across packages."""

from graphlib import TopologicalSorter

import grimp


def test_no_files_import_each_other_in_a_circle() -> None:
    """The contract on circles cannot see them where one package may import another by name."""
    graph = grimp.build_graph("gpulease", exclude_type_checking_imports=True, cache_dir=None)
    files = {file: graph.find_modules_directly_imported_by(file) for file in graph.modules}
    TopologicalSorter(files).prepare()

"""Executes a notebook as a job. Standard library, nbclient and nbformat only.

Usage: python notebook_main.py NOTEBOOK [--output FILE]

It runs in any Python that has nbclient. Cells print to the output of the job as well.
"""

import argparse
import os
import sys

del sys.path[0]  # the folder of this file, whose modules are not the user's

import nbformat  # noqa: E402
from jupyter_client.kernelspec import NoSuchKernel  # noqa: E402
from nbclient import NotebookClient  # noqa: E402
from nbclient.exceptions import CellExecutionError  # noqa: E402


class PrintingClient(NotebookClient):
    """Prints what the cells print."""

    def process_message(self, msg, cell, cell_index):
        """Handle one message of the kernel."""
        if msg["msg_type"] == "stream":
            stream = sys.stderr if msg["content"]["name"] == "stderr" else sys.stdout
            stream.write(msg["content"]["text"])
            stream.flush()
        return super().process_message(msg, cell, cell_index)


def main():
    """Execute the notebook of the command line, and return the exit status."""
    parser = argparse.ArgumentParser(prog="gpulease run NOTEBOOK")
    parser.add_argument("notebook")
    parser.add_argument("-o", "--output", metavar="FILE", help="default: NAME.out.ipynb")
    asked = parser.parse_args()
    output = asked.output or os.path.splitext(asked.notebook)[0] + ".out.ipynb"
    notebook = nbformat.read(asked.notebook, as_version=4)
    folder = os.path.dirname(os.path.abspath(asked.notebook))

    def save(**_):
        part = output + ".part"
        nbformat.write(notebook, part)
        os.replace(part, output)

    client = PrintingClient(
        notebook,
        timeout=None,
        resources={"metadata": {"path": folder}},
        on_cell_executed=save,
    )
    was_started = True
    try:
        return execute(client)
    except NoSuchKernel as error:
        was_started = False
        sys.stderr.write("gpulease: cannot run %s: %s\n" % (asked.notebook, error))
        return 1
    finally:
        if was_started:
            save()
            sys.stderr.write("gpulease: the notebook with its output is %s\n" % output)


def execute(client):
    """Execute the notebook, and return the exit status."""
    try:
        client.execute()
    except CellExecutionError as error:
        sys.stderr.write("%s\n" % error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

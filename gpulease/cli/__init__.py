"""The `gpulease` command: parse, one call, print. Each verb is a file, imported when it is used."""

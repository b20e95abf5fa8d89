"""Runs gpulease-web."""


def main() -> None:
    """Serve the web page until it is stopped."""
    raise NotImplementedError


if __name__ == "__main__":
    main()

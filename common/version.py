from importlib import metadata

LOPA_VERSION = "0.1.0"


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None: it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def release_of(version: str) -> str:
    """Cut a version to its release: 2.13.0 of 2.13.0+cpu, 2.13.0.post2 and 2.13.0rc1. Builds of a library's own that
    follow torch's releases have its numbers."""
    return ".".join(version.split("+")[0].split("rc")[0].split(".")[:3])

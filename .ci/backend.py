"""setuptools' build backend, for a README whose relative links lead nowhere on an index page.

There is no address that they could be completed with, so they become plain text, and pictures are
left out. The source distribution gets this file, too, without which it cannot be built.
"""

import re

from setuptools import Distribution
from setuptools.build_meta import *  # noqa: F403  all the hooks
from setuptools.command.sdist import sdist

MORE_FILES = [".ci/backend.py", "CHANGELOG.md", "CONTRIBUTING.md"]

parse_config_files = Distribution.parse_config_files
add_defaults = sdist.add_defaults


def without_relative_links(text: str) -> str:
    """Return Markdown with links to other sites and within the page alone."""
    relative = r"\[([^]\[]*)\]\((?!\w+:|#)[^)]*\)"
    return re.sub(relative, r"\1", re.sub("!" + relative + r"\n*", "", text))


def parse_with_plain_links(self: Distribution, *args: object, **options: object) -> None:
    parse_config_files(self, *args, **options)
    self.metadata.long_description = without_relative_links(self.metadata.long_description)


def add_more(self: sdist) -> None:
    add_defaults(self)
    self.filelist.extend(MORE_FILES)


Distribution.parse_config_files = parse_with_plain_links
sdist.add_defaults = add_more

"""Exit codes of the command.

0 success, 1 failure, 2 refused (configuration, plugins, flags, differing hosts), 3 finished, but a
part failed.
"""

from __future__ import annotations

OK = 0
FAILED = 1
REFUSED = 2
PARTLY = 3
SECOND_SIGNAL = 130  #: the code with which shells report an interrupted program

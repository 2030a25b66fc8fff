"""How a command ends: 0 done, 1 failed, 2 refused (configuration, plugins, flags, hosts that do not
agree).
"""

from __future__ import annotations

OK = 0
FAILED = 1
REFUSED = 2
SECOND_SIGNAL = 130  #: as a shell reports an interrupted program

"""How a command ends: 0 done, 1 failed, 2 refused (configuration, plugins, flags, hosts that do not agree)."""
from __future__ import annotations

OK, FAILED, REFUSED = 0, 1, 2
SECOND_SIGNAL = 130  #: as a shell reports an interrupted program

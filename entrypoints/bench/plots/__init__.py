"""Charts of benchmark records as SVG, drawn with matplotlib: ``glowplug bench plot``.

``catalogue`` lists the charts, ``drawing`` lays their panels out and writes the files. The other
modules read records and draw panels. matplotlib is an optional package (``glowplug[plots]``), which
only ``drawing`` imports.
"""

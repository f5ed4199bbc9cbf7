"""Placement, actors and the order of events.  In the core, the only package that imports ray."""

"""Placement, actors and the order of events.  The only package that imports ray."""

"""Where things run, and when: placement, actors, the order of events.  The only package that imports ray."""

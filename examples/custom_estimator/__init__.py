"""An advantage estimator that slime does not have, added from outside; see docs/customization.md."""

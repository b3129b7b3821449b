"""omni_fsm: the inter-stage protocol of multi-stage model pipelines, as explicit state machines."""

"""What all experiments share: options, models, plan, store, tables, plots, origin."""

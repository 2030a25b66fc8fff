"""The core: contracts, the plan, and the loop. It knows no plugin, no model and no kernel."""

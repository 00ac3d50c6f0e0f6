"""A gang: ranks that live and die together, one Ray actor each. The only folder that imports ray."""

"""How a model lies on processes: who they are, which axes they form, who holds what."""

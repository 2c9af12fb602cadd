"""Export and import of weights in the formats of other libraries."""

"""What `longspan bench` measures. Figures are medians; nothing here is asserted on in tests."""

"""What trainers type. These tests skip where their library is not installed: `pip install
'.[trainers]'` brings all."""

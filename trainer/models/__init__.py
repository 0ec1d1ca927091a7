"""Networks: reading, building, adapting and exporting them."""

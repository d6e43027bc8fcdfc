"""What every room with models needs: torchvision repair, data tables, model folders, building what is missing."""

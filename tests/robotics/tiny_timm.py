"""Two vision transformers of the kinds in OpenVLA, DINOv2 with registers and SigLIP, small enough for a test."""


def register() -> tuple[str, str]:
    """Register both with timm; returns their names."""
    from timm.models import register_model
    from timm.models.vision_transformer import VisionTransformer

    shared = {"patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2, "mlp_ratio": 2}

    def tiny_dino(pretrained=False, **options):
        kind = {"reg_tokens": 2, "no_embed_class": True, "init_values": 1e-5}
        return _made(VisionTransformer, {**shared, **kind, **options})

    def tiny_siglip(pretrained=False, **options):
        return _made(VisionTransformer, {**shared, "class_token": False, "global_pool": "map", **options})

    for build in (tiny_dino, tiny_siglip):
        build.__module__ = __name__
        register_model(build)
    return "tiny_dino", "tiny_siglip"


def _made(kind, options):
    known = ("img_size", "num_classes", "act_layer", "patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio")
    known += ("reg_tokens", "no_embed_class", "init_values", "class_token", "global_pool")
    return kind(**{name: value for name, value in options.items() if name in known})

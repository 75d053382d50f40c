"""What nanoGPT, transformers, litgpt and torchtune call the settings of a recipe, for those who come from there."""

EPOCHS = "steps: once through the text is its tokens divided by batch.size × batch.length"
ACCUMULATION = "batch.micro: how many of the batch.size sequences are in memory at once"

# a key of a recipe (or none), and after a colon how it differs, or what to do → names elsewhere, which nothing here has
NAMES_ELSEWHERE = {
    # how long, how much, how fast
    "steps": "max_steps max_iters num_steps train_steps iterations iters",
    EPOCHS: "epochs num_epochs num_train_epochs max_epochs",
    "optimizer.lr": "lr learning_rate max_lr",
    "schedule.floor: a share of optimizer.lr": "min_lr",
    "schedule.warmup": "warmup warmup_steps warmup_iters lr_warmup_steps num_warmup_steps",
    "schedule.warmup: in steps": "warmup_ratio",
    "schedule.kind": "lr_scheduler lr_scheduler_type scheduler",
    "optimizer.kind": "optim",
    "optimizer.weight_decay": "weight_decay wd",
    "optimizer.momentum": "momentum",
    "optimizer.betas": "betas",
    "optimizer.betas: both of them, as in [0.9, 0.95]": "beta1 beta2 adam_beta1 adam_beta2",
    "optimizer.eps": "adam_epsilon",
    "optimizer.clip": "grad_clip clip_grad max_grad_norm gradient_clipping clip_grad_norm",
    "objective.smoothing": "label_smoothing label_smoothing_factor",
    # batches
    "batch.size": "batch_size global_batch_size train_batch_size",
    "batch.micro: batch.size counts the sequences of a whole step": "per_device_train_batch_size",
    "batch.micro": "micro_batch_size",
    ACCUMULATION: "gradient_accumulation_steps grad_accumulation_steps accumulate",
    "batch.recompute": "gradient_checkpointing activation_checkpointing enable_activation_checkpointing",
    "batch.length": "seq_len seq_length sequence_length max_seq_length max_seq_len max_length",
    # the model
    "model.layers": "layers n_layer n_layers num_layers num_hidden_layers",
    "model.attention.heads": "heads n_head n_heads num_heads num_attention_heads",
    "model.attention.kv_heads": "n_kv_heads num_kv_heads num_key_value_heads n_query_groups",
    "model.attention.d_head": "head_dim head_size",
    "model.attention.window": "sliding_window",
    "model.d_model": "d_model dim embed_dim n_embd hidden_size hidden_dim",
    "model.feedforward.d_ff": "d_ff ffn_dim intermediate_size",
    "model.feedforward.activation": "hidden_act",
    "model.context": "context block_size context_length n_positions n_ctx max_position_embeddings",
    "model.dropout": "dropout hidden_dropout_prob",
    "model.attention.dropout": "attention_dropout attention_probs_dropout_prob",
    "model.position.base": "rope_theta rope_base",
    "model.norm.eps": "rms_norm_eps layer_norm_eps norm_eps",
    "model.head.tied": "tie_word_embeddings tie_weights",
    "model.init.std": "initializer_range",
    "tokenizer.vocab_size": "vocab_size",
    "model: as in model=gpt-tiny": "model_name",
    "init: the folder of a run; `weft import` makes one of a model from elsewhere": "model_name_or_path",
    "init": "init_from pretrained checkpoint_dir",
    # low-rank adapters
    "adapter.rank": "r lora_r lora_rank",
    "adapter.alpha": "lora_alpha",
    "adapter.dropout": "lora_dropout",
    "adapter.targets": "target_modules",
    # evaluations, checkpoints, the machine
    "evaluate.every": "eval_interval eval_steps eval_every",
    "evaluate.tokens: in tokens": "eval_iters",
    "evaluate.patience": "early_stopping_patience patience",
    "evaluate.metric": "metric_for_best_model",
    "checkpoint.every": "save_steps save_interval checkpoint_interval",
    "checkpoint.keep": "save_total_limit",
    "log.every": "log_interval logging_steps",
    "log.wandb": "wandb wandb_log",
    "log.tensorboard": "tensorboard",
    "precision": "dtype",
    "precision: precision = 'bf16'": "bf16",
    "precision: precision = 'fp16'": "fp16",
    "precision: precision = 'tf32'": "tf32",
    "compile": "torch_compile",
    "seed": "random_seed",
    ": a GPU is used where there is one; CUDA_VISIBLE_DEVICES= in the environment does without": "device cuda use_cuda",
    ": weft train --processes 4 uses four GPUs": "devices gpus num_gpus n_gpus ngpus nproc_per_node",
    # data
    "data.sources": "dataset train_file train_data data_path",
    "data.column": "text_column dataset_text_field column",
    "data.validation.fraction": "val_split val_split_fraction validation_split val_fraction",
    "data.validation.kind": "validation",
    "data.validation.sources: with data.validation.kind = 'files'": "validation_file val_file",
}

SYNONYMS = {name: key for key, names in NAMES_ELSEWHERE.items() for name in names.split()}

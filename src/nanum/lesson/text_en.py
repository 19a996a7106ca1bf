"""The lesson's words in English. `text_ko` has the same keys with the same fields."""

TEXT: dict[str, str] = {
    # Ways, phases, dimensions: what tables are made of
    "way": "Way of dividing",
    "data_parallel": "data parallel",
    "tensor_parallel": "tensor parallel",
    "pipeline": "pipeline",
    "hidden_size": "hidden size × 2",
    "micro_batch_size": "batch × 2",
    "num_hidden_layers": "layers × 2",
    "independent": "independent",
    "proportional": "proportional",
    "square": "its square",
    "between": "in between",
    "refused": "refused",
    "gpus": "{n} GPUs",
    "one_gpu": "1 GPU",
    "no_limit": "none",
    # Part A
    "A.title": "A. What is exchanged",
    "A.intro": (
        "Take a model of the 7B class: {layers} layers, hidden size {hidden}, sequences of {seq} tokens, a "
        "micro-batch of {batch}, in bf16. By the lesson's own counting a step exchanges:"
    ),
    "A.bytes": "Bytes",
    "A.exactly": "To the byte",
    "A.when": "When",
    "A.what": "What",
    "A.data_parallel.when": "once a step",
    "A.tensor_parallel.when": "twice a layer",
    "A.pipeline.when": "each boundary",
    "A.data_parallel.what": "gradients",
    "A.tensor_parallel.what": "block outputs",
    "A.pipeline.what": "block outputs",
    "A.convention": (
        "This counting is loose, and named here because its figures are well known: the all-reduce of the gradients "
        "counts twice their bytes, a tensor-parallel all-reduce its payload once and in the forward pass only, the "
        "pipeline one boundary in the forward pass. The lesson prints {lesson} GB where rounding gives {ours}."
    ),
    "A.parameters": "Seven billion is nominal: {model} has {real} parameters, which makes the first row {bytes} GB.",
    "A.sweep": "Double one dimension at a time, and see what each way's bytes follow:",
    "A.sweep_reading": (
        "Data parallel pays for the size of the model and nothing for the batch. Tensor parallel pays for "
        "activations, in every layer. The pipeline pays for one layer's activations however many layers there are."
    ),
    "A.sent": (
        "Now what one rank really sends: {model} divided by {group}, one micro-batch, conventions of {engine}, ring "
        "algorithms, the rank that sends most. Seconds are predicted on two links: with the eight in one node, "
        "{in_node}; with one in each of eight nodes, {between_nodes}."
    ),
    "A.link": "{name} ({rate} each way, {efficiency} of it as measured among {group} GPUs)",
    "A.forward": "Forward",
    "A.backward": "Backward",
    "A.messages": "Messages",
    "A.sent_bytes": "Sent",
    "A.in_node": "In a node",
    "A.between_nodes": "Between nodes",
    "A.same_step": (
        "Those are bytes of one micro-batch a rank: there data parallel's eight ranks had worked on {sequences} "
        "sequences together, the others on one micro-batch. For one step of {sequences} sequences by each way, with "
        "the step's time and, in brackets, how long GPUs wait for messages (whether it fits is part C's question):"
    ),
    "A.price": (
        "Volume is not the price. How many messages there are, over which link, and how much of them hides behind "
        "computation weigh as much: in a node {in_node} is the fastest of the three, between nodes {between_nodes}."
    ),
    "A.bubble": (
        "What the pipeline pays instead is its bubble. With {stages} equal stages, the share of a step that a stage "
        "waits, by number of micro-batches:"
    ),
    "A.microbatches": "Micro-batches",
    "A.waits": "Waits",
    "A.overlaid": (
        "All three at once, on {cluster}: tensor parallel {tp} × pipeline {pp} × data parallel {dp}, {microbatches} "
        "micro-batches. The same division, placed in three ways:"
    ),
    "A.placement": "Placement",
    "A.tp_in_node": "TP in the node, PP and DP between nodes",
    "A.tp_over_two_nodes": "DP in the node, TP over two nodes",
    "A.tp_over_four_nodes": "PP and DP in the node, TP over four nodes",
    "A.step": "Step",
    "A.exposed": "Exposed",
    "A.times": "Times",
    "A.overlaid_reading": (
        "Nothing but the order of ranks differs. Putting the dearest exchange on the dearest link makes the step "
        "{worst} times as long. (Every step here is a prediction: expect between {low} and {high} times what is "
        "printed.)"
    ),
    # Part B
    "B.title": "B. What cannot be divided sets the ceiling",
    "B.progress": "timing the shares",
    "B.intro": (
        "Measured on {device}, torch {torch}: forward and backward pass of {layers} layers of {hidden} × {hidden} in "
        "{dtype} on {rows} rows. Base time {base}. The rows were really cut to 1/N and timed, {repeats} times each, "
        "all sizes in turn:"
    ),
    "B.share": "Share",
    "B.rows": "Rows",
    "B.median": "Median",
    "B.middle_half": "Middle half",
    "B.spread": "Spread",
    "B.efficiency": "Efficiency",
    "B.quiet": (
        "The samples are steady: the middle half of each spreads over at most {spread} of its median ({limit} is the "
        "limit)."
    ),
    "B.noisy": (
        "This machine was too noisy for fine differences: at 1/{n} the middle half of the samples spreads over "
        "{spread} of the median, more than {limit}. Close other programs and run B again."
    ),
    "B.measured": (
        "Speedup, measured: the serial part s of the base time stays whole, the rest takes the time of its measured "
        "share."
    ),
    "B.ideal": "Speedup by Amdahl's law, 1 / (s + (1 − s)/N):",
    "B.serial": "Serial",
    "B.limit": "Limit",
    "B.why_slower": (
        "The two differ by the efficiency above: a 32nd of the rows ran at {efficiency} of the base's speed. Small "
        "pieces keep fewer of the chip's units busy, and the weights are read and their gradients written in full "
        "for fewer rows."
    ),
    "B.why_faster": (
        "The two differ by the efficiency above: a 32nd of the rows ran at {efficiency} of the base's speed. Not "
        "below it this time: the smaller piece fits a cache, or the samples are noisy."
    ),
    "B.doubling": (
        "One more doubling, from {before} to {after} GPUs at {serial}, still buys {measured} times (the law says "
        "{ideal}; the lesson measured {lesson}). Cutting the serial part from {serial} to {smaller} instead, with "
        "{before} GPUs, buys {cutting} times."
    ),
    # Part C
    "C.title": "C. Dividing is for memory too",
    "C.progress": "one training step",
    "C.intro": (
        "Measured on {device}, torch {torch}: one AdamW step of {parameters} parameters in fp32 ({layers} layers of "
        "{hidden} × {hidden}), every storage counted once:"
    ),
    "C.what": "What",
    "C.memory": "Memory",
    "C.multiple": "× parameters",
    "C.allocator": "Allocator",
    "C.params": "parameters",
    "C.grads": "gradients",
    "C.optimizer_states": "AdamW's two moments",
    "C.total": "total",
    "C.activations": "+ activations",
    "C.step_counters": "Beside them AdamW keeps a step counter for each tensor, {bytes} bytes in all.",
    "C.workspace": (
        "The allocator's gradients hold {workspace} MB of matrix-multiply workspace as well, taken at the first "
        "matmul and kept: without it {grads} MB."
    ),
    "C.beside": (
        "Activations are what the backward pass needs of {rows} rows; they grow with the batch, the four above do "
        "not. Running the same rows without training peaks at {inference} MB, a training step at {training} MB, "
        "{times} times as much."
    ),
    "C.zero": (
        "Can that be divided too? A model of 7 billion parameters in fp32, memory of each GPU by what is sharded "
        "among them (ZeRO):"
    ),
    "C.sharded": "Sharded",
    "C.none": "nothing",
    "C.optimizer": "optimizer",
    "C.optimizer+grads": "+ gradients",
    "C.optimizer+grads+params": "+ parameters",
    "C.zero_sent": (
        "And what one rank of {model} sends for it in a step, in fp32, by the conventions of {engine} (messages in "
        "brackets):"
    ),
    "C.refused": "An engine that refuses says why: {reasons}",
    "C.trade": (
        "With {gpus} GPUs, sharding everything leaves {after} GB of {before} on each, and sends {times} times as "
        "much. Memory is bought with traffic."
    ),
    # The misconceptions
    "M.title": "Five beliefs, and what the numbers say",
    "M.twice_the_gpus": (
        "“Twice the GPUs, twice the speed.” The serial part decides. With {serial} of it, {gpus} GPUs run {speedup} "
        "times as fast as one, and the last doubling bought {doubling} times. No number of GPUs passes {limit}."
    ),
    "M.least_volume": (
        "“The way that sends least is best.” By the lesson's counting they exchange: {bytes}. A step of {sequences} "
        "sequences on {gpus} GPUs takes in a node: {in_node}; between nodes: {between_nodes}. First in a node is "
        "{first_in_node}, between nodes {first_between_nodes}: messages, links and waiting count as well as bytes."
    ),
    "M.memory_is_parameters": (
        "“Memory is the size of the parameters.” Training keeps {kept} times that, and here another {activations} "
        "for activations; the step peaked at {training} times. Without training the peak was {inference} times."
    ),
    "M.zero_is_free": (
        "“ZeRO is free.” On {gpus} GPUs it takes {before} GB a GPU down to {after}, and what a rank sends in a step "
        "from {sent_before} to {sent_after} GB."
    ),
    "M.a_real_cluster": (
        "“So a cluster will do what these numbers say.” It will do worse. On one GPU the step of part A's job would "
        "take {one} if it fitted, and divided by {gpus} that is {arithmetic}. Predicted on {cluster}: {predicted} "
        "(between {low} and {high}), {worse} times as long, so that {gpus} GPUs give a speedup of {speedup}. Of the "
        "step, exposed communication takes {exposed} and the bubble {bubble} ({imbalance} of it because stages are "
        "not equal); without the latency of messages it would be {latency} shorter. Amdahl's law would call that a "
        "serial part of {serial}."
    ),
    # What is refused
    "later": "part {part} of the lesson belongs to a later release: this one has {parts}",
    "unknown": "{part} is not a part of the lesson: it has {parts}",
    "no_torch": "part {part} measures with PyTorch, which is not installed: pip install 'nanum[torch]'",
}

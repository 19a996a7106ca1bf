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
    "network": "network",
    "processor": "{kind} ({name})",
    "processor.one_thread": "{kind} ({name}, 1 thread)",
    "processor.threads": "{kind} ({name}, {threads} threads)",
    "tag.datasheet": "datasheet",
    "tag.measured": "measured",
    "tag.assumed": "assumed",
    "tag.derived": "derived",
    "gpus": "{n} GPUs",
    "one_gpu": "1 GPU",
    "no_limit": "none",
    # Part A
    "A.title": "A. What is exchanged",
    "A.intro": (
        "This lesson grew from a shorter one on distributed training, called the original below. So that figures can "
        "be compared, the first table keeps the original's way of counting, called the loose counting. Take a model of "
        "the 7B class: {layers} layers, hidden size {hidden}, sequences of {seq} tokens, a micro-batch of {batch}, in "
        "bf16. By the loose counting a step exchanges:"
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
        "What is loose: the all-reduce of the gradients counts twice their bytes, a tensor-parallel all-reduce its "
        "payload once and in the forward pass only, the pipeline one boundary in the forward pass. (The original "
        "prints {lesson} GB where rounding gives {ours}.)"
    ),
    "A.parameters": "Seven billion is nominal: {model} has {real} parameters, which makes the first row {bytes} GB.",
    "A.sweep": "Double one dimension at a time, and see what each way's bytes follow:",
    "A.sweep_reading": (
        "Data parallel pays for the size of the model and nothing for the batch. Tensor parallel pays for "
        "activations, in every layer. The pipeline pays for one layer's activations however many layers there are."
    ),
    "A.sent": (
        "Now what one rank really sends: {model} divided by {group}, one micro-batch, conventions of {engine}, ring "
        "algorithms, the rank that sends most. Times are predicted on two links: with the eight in one node, "
        "{in_node}; with one in each of eight nodes, {between_nodes}."
    ),
    "A.link": "{name} ({rate} each way, {rate_known}; {efficiency} of it among {group} GPUs, {efficiency_known})",
    "A.borrowed": "{tag}, borrowed from {where}",
    "A.forward": "Forward",
    "A.backward": "Backward",
    "A.messages": "Messages",
    "A.sent_bytes": "Sent",
    "A.in_node": "In a node",
    "A.between_nodes": "Between nodes",
    "A.reconciled": (
        "Why not {loose_data} and {loose_tensor} GB? Data parallel: this engine reduces gradients in fp32, {grad} "
        "bytes and not 2 for each of {real} parameters, {grads} GB in all, and in a ring of {group} a rank passes on "
        "2·({group} − 1)/{group} = {ring} times that: {data} GB. Tensor parallel: {ring} times {loose_tensor} is "
        "{layers} GB in the layers; embedding and loss add {ends} GB, which makes {forward} GB forward. Backward, with "
        "the head's gradient in their place, it is as much again: {both} GB. The pipeline's boundary is crossed once "
        "each way."
    ),
    "A.same_step": (
        "Those are bytes of one micro-batch a rank: there data parallel's eight ranks had worked on {sequences} "
        "sequences together, the others on one micro-batch. For one step of {sequences} sequences by each way, with "
        "the step's time and, in brackets, how long GPUs wait for messages, the exposed communication (whether it fits "
        "is part C's question):"
    ),
    "A.price": (
        "Volume is not the price. How many messages there are, over which link, and how much of them hides behind "
        "computation weigh as much: in a node {in_node} is the fastest of the three, between nodes {between_nodes}."
    ),
    "A.bubble": (
        "What the pipeline pays instead is its bubble, the time in which stages have nothing to do. With {stages} "
        "equal stages, the share of a step that a stage waits, by number of micro-batches:"
    ),
    "A.microbatches": "Micro-batches",
    "A.waits": "Waits",
    "A.overlaid": (
        "All three at once, on {cluster}: tensor parallel {tp} × pipeline {pp} × data parallel {dp}, {microbatches} "
        "micro-batches on each data-parallel rank, {sequences} sequences ({tokens} tokens) a step. The same division, "
        "placed in three ways:"
    ),
    "A.placement": "Placement",
    "A.tp_in_node": "TP in the node, PP and DP between nodes",
    "A.tp_over_two_nodes": "DP in the node, TP over two nodes",
    "A.tp_over_four_nodes": "PP and DP in the node, TP over four nodes",
    "A.step": "Step",
    "A.exposed": "Exposed",
    "A.times": "Times",
    "A.overlaid_reading": (
        "Nothing but the order of ranks differs. Putting the largest exchange on the slowest link makes the step "
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
        "The samples are too noisy for fine differences: at 1/{n} the middle half of the samples spreads over "
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
    "B.why_noisy": (
        "The two differ by the efficiency above: a 32nd of the rows ran at {efficiency} of the base's speed, but in "
        "samples as noisy as these that shows little. What to expect is below 100%: small pieces keep fewer of the "
        "chip's units busy, and the weights are read and their gradients written in full for fewer rows."
    ),
    "B.doubling": (
        "One more doubling, from {before} to {after} GPUs with {serial} serial, still buys {measured} times (the "
        "middle halves of the samples, spread over at most {spread}, leave room from {low} to {high}; the law says "
        "{ideal}; the original measured {lesson} on its own device). Cutting the serial part from {serial} to "
        "{smaller} instead, with {before} GPUs, buys {cutting} times."
    ),
    "B.doubling_noisy": (
        "One more doubling, from {before} to {after} GPUs with {serial} serial, buys {ideal} times by the law (the "
        "original measured {lesson} on its own device). The {measured} times measured here are not to be relied on: "
        "the middle halves of the samples, spread over up to {spread}, leave room from {low} to {high}. Cutting the "
        "serial part from {serial} to {smaller} instead, with {before} GPUs, buys {cutting} times by the law."
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
    "C.activations_grow": (
        "Activations are what the backward pass needs of {rows} rows; they grow with the batch, the four above do not."
    ),
    "C.peaks": (
        "Peaks: running the same rows without training takes {inference} MB, {inference_ratio} times the parameters; "
        "a training step takes {training} MB, {training_ratio} times the parameters, or {times} times the peak "
        "without training."
    ),
    "C.peak_optimizer": (
        "Total and activations would add up to {together} MB, {together_ratio} times the parameters, but are never all "
        "there at once: the backward pass frees activations as it makes gradients. The peak was measured after it, in "
        "the optimizer's step: {over} MB over the total, as much as {matrices} of the {layers} weight matrices, for "
        "the step's temporary copies."
    ),
    "C.peak_backward": (
        "Total and activations would add up to {together} MB, {together_ratio} times the parameters. The peak was "
        "measured in the backward pass, which frees activations as it makes gradients."
    ),
    "C.moment.optimizer": "optimizer's step",
    "C.moment.backward": "backward pass",
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
    "C.calls": (
        "The messages: with nothing sharded, one all-reduce for each of {all_reduces} buckets of gradients. With the "
        "optimizer sharded, {buckets_reduced} reduce-scatters of gradients and {buckets_gathered} all-gathers of "
        "parameters, still by buckets. From gradients on it goes part by part (each layer, and the model's two ends): "
        "{parts_reduced} reduce-scatters and {parts_gathered} all-gathers. With parameters sharded each part is "
        "gathered twice, for the forward and for the backward pass, and reduced once: {gathered_twice} and "
        "{reduced_once}."
    ),
    "C.trade": (
        "With {gpus} GPUs, sharding everything leaves {after} GB of {before} on each, and sends {times} times as "
        "much. Memory is bought with traffic."
    ),
    # The misconceptions
    "M.title": "Five beliefs, and what the numbers say",
    "M.twice_the_gpus": (
        "“Twice the GPUs, twice the speed.” The serial part decides. With {serial} of it, {gpus} GPUs run {speedup} "
        "times as fast as one, and the last doubling bought {doubling} times (B; the law says {ideal_speedup} and "
        "{ideal_doubling}, and samples spread over at most {spread}). No number of GPUs passes {limit}."
    ),
    "M.twice_the_gpus_noisy": (
        "“Twice the GPUs, twice the speed.” The serial part decides. With {serial} of it, {gpus} GPUs run "
        "{ideal_speedup} times as fast as one by Amdahl's law, and the last doubling buys {ideal_doubling} times. (B "
        "measured {speedup} and {doubling}, in samples spread over up to {spread}: too noisy to rely on.) No number "
        "of GPUs passes {limit}."
    ),
    "M.least_volume": (
        "“The way that sends least is best.” By the loose counting they exchange: {bytes}. A step of {sequences} "
        "sequences on {gpus} GPUs takes in a node: {in_node}; between nodes: {between_nodes}. First in a node is "
        "{first_in_node}, between nodes {first_between_nodes}: messages, links and waiting count as well as bytes."
    ),
    "M.memory_is_parameters": (
        "“Memory is the size of the parameters.” Training keeps {kept} times that; activations are another "
        "{activations} times here, until the backward pass frees them. The step's peak, in the {moment}, was "
        "{training} times the parameters, and the peak without training {inference} times."
    ),
    "M.zero_is_free": (
        "“ZeRO is free.” On {gpus} GPUs it takes {before} GB a GPU down to {after}, and what a rank sends in a step "
        "from {sent_before} to {sent_after} GB."
    ),
    "M.a_real_cluster": (
        "“So a cluster will do what these numbers say.” It will do worse. A step of the job that overlaid all three in "
        "A, {sequences} sequences or {tokens} tokens, would take {one} on one GPU if it fitted, and divided by {gpus} "
        "that is {arithmetic}. Predicted on {cluster}: {predicted} (between {low} and {high}), {worse} times as long, "
        "so that {gpus} GPUs give a speedup of {speedup}. Of the step, exposed communication takes {exposed} and the "
        "bubble {bubble} (unequal stages make {imbalance} of it); without the latency of messages it would be "
        "{latency} shorter. Amdahl's law would call that a serial part of {serial}."
    ),
    # What is refused
    "unknown": "{part} is not a part of the lesson: it has {parts}",
    "no_torch": "part {part} measures with PyTorch, which is not installed: pip install 'nanum[torch]' "
    "(in a checkout: pip install -e '.[torch]')",
}

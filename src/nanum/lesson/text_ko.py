"""The lesson's words in Korean. `text_en` has the same keys with the same fields."""

TEXT: dict[str, str] = {
    "way": "나누는 방식",
    "data_parallel": "데이터 병렬",
    "tensor_parallel": "텐서 병렬",
    "pipeline": "파이프라인",
    "hidden_size": "은닉 크기 2배",
    "micro_batch_size": "배치 2배",
    "num_hidden_layers": "층수 2배",
    "independent": "무관",
    "proportional": "비례",
    "square": "제곱에 비례",
    "between": "그 사이",
    "refused": "거절됨",
    "gpus": "{n}장",
    "one_gpu": "1장",
    "no_limit": "없음",
    "A.title": "A. 무엇을 주고받는가",
    "A.intro": (
        "7B급 모델을 놓고 센다. {layers}층, 은닉 크기 {hidden}, 시퀀스 길이 {seq}, 마이크로배치 {batch}, bf16이다. "
        "이 수업의 셈법으로 한 스텝에 오가는 양은 다음과 같다."
    ),
    "A.bytes": "양",
    "A.exactly": "정확한 바이트",
    "A.when": "언제",
    "A.what": "무엇을",
    "A.data_parallel.when": "스텝에 한 번",
    "A.tensor_parallel.when": "층마다 두 번",
    "A.pipeline.when": "경계마다",
    "A.data_parallel.what": "그라디언트",
    "A.tensor_parallel.what": "블록의 출력",
    "A.pipeline.what": "블록의 출력",
    "A.convention": (
        "느슨한 셈법이지만 이 수치들이 널리 알려져 있어 그대로 둔다. 그라디언트의 all-reduce는 크기의 두 배로, 텐서 "
        "병렬은 순전파만 한 번씩, 파이프라인은 순전파의 경계 하나만 센다. 수업은 {lesson} GB라고 적었지만 반올림하면 "
        "{ours} GB다."
    ),
    "A.parameters": (
        "70억은 어림수다. {model}의 실제 파라미터는 {real}개이고, 이 값으로 셈하면 첫 줄은 {bytes} GB가 된다."
    ),
    "A.sweep": "차원을 하나씩 두 배로 키워, 각 방식의 양이 무엇을 따라가는지 본다.",
    "A.sweep_reading": (
        "데이터 병렬은 모델 크기만큼 치르고 배치에는 치르지 않는다. 텐서 병렬은 활성값의 크기만큼, 그것도 모든 "
        "층에서 치른다. 파이프라인은 층이 아무리 많아도 한 층의 활성값만큼만 치른다."
    ),
    "A.sent": (
        "이번에는 한 랭크가 실제로 보내는 양이다. {model} 모델을 {group}장에 나누고, 마이크로배치는 하나, {engine}의 "
        "방식과 링 알고리즘을 따르며, 가장 많이 보내는 랭크를 적었다. 시간은 두 가지 링크에서 예측했다. 여덟 장이 한 "
        "노드에 있을 때는 {in_node}, 여덟 노드에 한 장씩 있을 때는 {between_nodes}이다."
    ),
    "A.link": "{name}(한 방향 {rate}, GPU {group}장에서 잰 효율 {efficiency})",
    "A.forward": "순전파",
    "A.backward": "역전파",
    "A.messages": "횟수",
    "A.sent_bytes": "보낸 양",
    "A.in_node": "노드 안",
    "A.between_nodes": "노드 사이",
    "A.same_step": (
        "위는 랭크마다 마이크로배치 하나일 때의 양이다. 그때 데이터 병렬의 여덟 랭크는 시퀀스 {sequences}개를 함께 "
        "처리했고, 나머지 둘은 마이크로배치 하나를 처리했을 뿐이다. 그래서 세 방식이 똑같이 시퀀스 {sequences}개를 "
        "한 스텝에 처리할 때를 비교한다. 시간은 한 스텝이고, 괄호 안은 GPU가 통신을 기다리는 시간이다(메모리에 "
        "들어가는지는 C에서 따진다)."
    ),
    "A.price": (
        "양이 곧 값은 아니다. 몇 번을, 어떤 링크로, 얼마나 계산 뒤에 숨겨 보내느냐도 그만큼 중요하다. 셋 가운데 노드 "
        "안에서는 {in_node}이 가장 빠르고, 노드 사이에서는 {between_nodes}이 가장 빠르다."
    ),
    "A.bubble": (
        "파이프라인이 대신 치르는 값은 거품이다. 똑같은 단계 {stages}개일 때, 한 단계가 스텝에서 노는 시간의 비율을 "
        "마이크로배치 수에 따라 적었다."
    ),
    "A.microbatches": "마이크로배치",
    "A.waits": "노는 비율",
    "A.overlaid": (
        "셋을 겹쳐 {cluster}에 올린다. 텐서 병렬 {tp} × 파이프라인 {pp} × 데이터 병렬 {dp}, 마이크로배치 "
        "{microbatches}개다. 똑같이 나누고 놓는 자리만 세 가지로 바꾼다."
    ),
    "A.placement": "배치",
    "A.tp_in_node": "노드 안 TP, 노드 사이 PP와 DP",
    "A.tp_over_two_nodes": "노드 안 DP, 두 노드에 걸친 TP",
    "A.tp_over_four_nodes": "노드 안 PP와 DP, 네 노드에 걸친 TP",
    "A.step": "스텝",
    "A.exposed": "드러난 통신",
    "A.times": "배수",
    "A.overlaid_reading": (
        "달라진 것은 랭크의 순서뿐이다. 가장 비싼 통신을 가장 비싼 링크에 놓으면 한 스텝이 {worst}배로 길어진다. "
        "(스텝 시간은 모두 예측값이며, 실제로는 적힌 값의 {low}배에서 {high}배 사이로 본다.)"
    ),
    "B.title": "B. 나눌 수 없는 부분이 천장이다",
    "B.progress": "조각의 시간을 재는 중",
    "B.intro": (
        "{device}, torch {torch}에서 쟀다. {hidden} × {hidden} 층 {layers}개의 순전파와 역전파를 {dtype} 형식으로 "
        "{rows}행에 대해 계산한다. 기준 시간은 {base}다. 행을 실제로 1/N로 잘라, 모든 크기를 번갈아 {repeats}번씩 "
        "쟀다."
    ),
    "B.share": "조각",
    "B.rows": "행",
    "B.median": "중앙값",
    "B.middle_half": "가운데 절반",
    "B.spread": "흩어짐",
    "B.efficiency": "효율",
    "B.quiet": "측정값이 고르다. 어느 크기에서도 가운데 절반이 중앙값의 {spread} 안에 든다(한계 {limit}).",
    "B.noisy": (
        "작은 차이를 가리기에는 기계가 너무 시끄러웠다. 1/{n} 조각에서 측정값의 가운데 절반이 중앙값의 {spread}에 "
        "걸쳐 흩어져 한계 {limit}를 넘었다. 다른 프로그램을 닫고 B를 다시 실행하자."
    ),
    "B.measured": "측정한 속도 향상. 직렬 부분은 기준 시간의 s만큼 그대로 두고, 나머지는 잰 조각의 시간을 썼다.",
    "B.ideal": "암달의 법칙이 말하는 속도 향상, 1 / (s + (1 − s)/N):",
    "B.serial": "직렬 비율",
    "B.limit": "한계",
    "B.why_slower": (
        "두 표의 차이는 위의 효율에서 온다. 행을 32분의 1로 자르면 기준 속도의 {efficiency}로 돌았다. 조각이 작으면 "
        "칩의 연산기를 다 채우지 못하고, 몇 안 되는 행 때문에 가중치를 모두 읽고 그 그라디언트를 모두 써야 한다."
    ),
    "B.why_faster": (
        "두 표의 차이는 위의 효율에서 온다. 행을 32분의 1로 자르면 기준 속도의 {efficiency}로 돌았다. 이번에는 "
        "느려지지 않았다. 작은 조각이 캐시에 들어갔거나 측정값이 흔들린 것이다."
    ),
    "B.doubling": (
        "직렬 {serial}에서 {before}장을 {after}장으로 두 배 늘려도 {measured}배를 얻을 뿐이다(법칙으로는 {ideal}배, "
        "수업의 측정으로는 {lesson}배). 그 대신 {before}장 그대로 직렬 비율을 {serial}에서 {smaller}로 줄이면 "
        "{cutting}배를 얻는다."
    ),
    "C.title": "C. 메모리 때문에도 나눈다",
    "C.progress": "학습 한 스텝",
    "C.intro": (
        "{device}, torch {torch}에서 쟀다. fp32 파라미터 {parameters}개({hidden} × {hidden} 층 {layers}개)를 AdamW로 "
        "한 스텝 학습시키고 저장 공간을 하나도 빠짐없이 한 번씩 셌다."
    ),
    "C.what": "무엇",
    "C.memory": "메모리",
    "C.multiple": "파라미터 대비",
    "C.allocator": "할당기",
    "C.params": "파라미터",
    "C.grads": "그라디언트",
    "C.optimizer_states": "AdamW의 두 모멘트",
    "C.total": "합계",
    "C.activations": "+ 활성값",
    "C.step_counters": "이 밖에 AdamW는 텐서마다 스텝 수를 적어 둔다. 모두 {bytes}바이트다.",
    "C.workspace": (
        "할당기의 그라디언트에는 첫 행렬곱이 잡아 둔 작업 공간 {workspace} MB가 섞여 있다. 그것을 빼면 {grads} MB다."
    ),
    "C.beside": (
        "활성값은 {rows}행의 역전파에 필요한 값이다. 배치를 키우면 늘어나지만 위의 넷은 그대로다. 같은 행을 학습 "
        "없이 돌리면 최대 {inference} MB, 학습 한 스텝은 최대 {training} MB로 {times}배다."
    ),
    "C.zero": (
        "이것도 나눌 수 있을까. fp32 파라미터 70억 개짜리 모델에서, 무엇을 쪼개느냐에 따른 한 장의 메모리다(ZeRO)."
    ),
    "C.sharded": "쪼갠 것",
    "C.none": "없음",
    "C.optimizer": "옵티마이저",
    "C.optimizer+grads": "+ 그라디언트",
    "C.optimizer+grads+params": "+ 파라미터",
    "C.zero_sent": (
        "그 대가로 {model}의 한 랭크가 한 스텝에 보내는 양이다. fp32이고 {engine}의 방식을 따랐다(괄호는 횟수)."
    ),
    "C.refused": "엔진이 거절한 까닭: {reasons}",
    "C.trade": (
        "{gpus}장에서 모두 쪼개면 한 장의 {before} GB가 {after} GB로 줄고, 보내는 양은 {times}배가 된다. 통신을 주고 "
        "메모리를 사는 셈이다."
    ),
    "M.title": "다섯 가지 오해와 숫자의 대답",
    "M.twice_the_gpus": (
        "“GPU가 두 배면 속도도 두 배다.” 직렬 부분이 정한다. 그것이 {serial}이면 {gpus}장으로 한 장의 "
        "{speedup}배까지 빨라지고, 마지막으로 두 배를 늘려 얻은 것은 {doubling}배다. 몇 장을 붙여도 {limit}배를 넘지 "
        "못한다."
    ),
    "M.least_volume": (
        "“적게 보내는 방식이 가장 좋다.” 이 수업의 셈법으로 주고받는 양은 {bytes}다. 그런데 GPU {gpus}장으로 시퀀스 "
        "{sequences}개를 한 스텝에 처리하면 노드 안에서는 {in_node}, 노드 사이에서는 {between_nodes}가 걸린다. 노드 "
        "안에서는 {first_in_node}이, 노드 사이에서는 {first_between_nodes}이 가장 빠르다. 양만이 아니라 횟수와 "
        "링크와 기다림까지 셈해야 한다."
    ),
    "M.memory_is_parameters": (
        "“메모리는 파라미터 크기만큼 든다.” 학습은 그 {kept}배를 들고 있고, 여기서는 활성값이 {activations}배 더 "
        "들었다. 스텝의 최댓값은 {training}배였다. 학습하지 않을 때의 최댓값은 {inference}배다."
    ),
    "M.zero_is_free": (
        "“ZeRO는 공짜다.” {gpus}장에서 한 장의 메모리가 {before} GB에서 {after} GB로 주는 동안, 한 랭크가 한 스텝에 "
        "보내는 양은 {sent_before} GB에서 {sent_after} GB가 된다."
    ),
    "M.a_real_cluster": (
        "“실제 클러스터도 이 숫자대로 움직인다.” 이보다 나쁘다. A에서 셋을 겹친 작업은 한 장에 들어간다고 쳐도 한 "
        "스텝에 {one} 걸리고, {gpus}로 나누면 {arithmetic}이다. {cluster}에서 예측한 값은 {predicted}({low}에서 "
        "{high} 사이)로 그 {worse}배다. {gpus}장으로 {speedup}배를 얻는 셈이다. 스텝 가운데 드러난 통신이 {exposed}, "
        "거품이 {bubble}(단계가 고르지 않은 탓이 {imbalance})이고, 메시지의 지연이 없다면 {latency} 짧아진다. 암달의 "
        "법칙으로 옮기면 직렬 비율 {serial}에 해당한다."
    ),
    "later": "수업의 {part} 부분은 다음 판에 실린다. 이 판에는 {parts}가 있다",
    "unknown": "{part}는 수업의 부분이 아니다. {parts}가 있다",
    "no_torch": "{part} 부분은 PyTorch로 재는데 설치되어 있지 않다: pip install 'nanum[torch]'",
}

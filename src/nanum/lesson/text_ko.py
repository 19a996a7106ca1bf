"""The lesson's words in Korean. `text_en` has the same keys with the same fields."""

TEXT: dict[str, str] = {
    "way": "나누는 방식",
    "data_parallel": "데이터 병렬",
    "tensor_parallel": "텐서 병렬",
    "pipeline": "파이프라인",
    "hidden_size": "은닉 크기 2배",
    "micro_batch_size": "배치 크기 2배",
    "num_hidden_layers": "층수 2배",
    "independent": "무관",
    "proportional": "비례",
    "square": "제곱에 비례",
    "between": "그 사이",
    "refused": "거절됨",
    "network": "네트워크",
    "processor": "{kind} 장치({name})",
    "processor.one_thread": "{kind}({name}, 스레드 1개)",
    "processor.threads": "{kind}({name}, 스레드 {threads}개)",
    "tag.datasheet": "데이터시트 값",
    "tag.measured": "실측값",
    "tag.assumed": "가정한 값",
    "tag.derived": "계산한 값",
    "gpus": "{n}장",
    "one_gpu": "1장",
    "no_limit": "없음",
    # Part A
    "A.title": "A. 무엇을 주고받는가",
    "A.intro": (
        "이 수업은 분산 학습을 다룬 더 짧은 수업에서 나왔다. 아래에서는 그 수업을 ‘원본’이라 부른다. 수치를 비교할 수 "
        "있도록 첫 표는 원본의 셈법을 그대로 따르며, 이를 ‘느슨한 셈법’이라 부른다. 7B급 모델을 예로 든다. {layers}층, "
        "은닉 크기 {hidden}, 시퀀스 길이 {seq}토큰, 마이크로배치 {batch}, bf16이다. 느슨한 셈법으로 한 스텝에 주고받는 "
        "양은 다음과 같다."
    ),
    "A.bytes": "양",
    "A.exactly": "정확한 바이트",
    "A.when": "언제",
    "A.what": "무엇을",
    "A.data_parallel.when": "스텝에 한 번",
    "A.tensor_parallel.when": "층마다 두 번",
    "A.pipeline.when": "경계마다",
    "A.data_parallel.what": "그래디언트",
    "A.tensor_parallel.what": "블록의 출력",
    "A.pipeline.what": "블록의 출력",
    "A.convention": (
        "느슨하다는 것은 이런 뜻이다. 그래디언트의 all-reduce는 그 크기의 두 배로 세고, 텐서 병렬의 all-reduce는 "
        "순전파에서만, 주고받는 데이터의 크기 그대로 세며, 파이프라인은 순전파에서 경계 하나만 센다. (원본에는 "
        "{lesson} GB라고 적혀 있지만 반올림하면 {ours} GB다.)"
    ),
    "A.parameters": (
        "70억은 어림수다. {model}의 실제 파라미터는 {real}개이고, 이 값으로 세면 첫 줄은 {bytes} GB가 된다."
    ),
    "A.sweep": "차원을 하나씩 두 배로 키워, 각 방식의 통신량이 무엇을 따라가는지 본다.",
    "A.sweep_reading": (
        "데이터 병렬은 모델 크기만큼 비용을 치르지만 배치 크기에는 비용을 치르지 않는다. 텐서 병렬은 활성값 크기만큼, "
        "그것도 모든 층에서 비용을 치른다. 파이프라인은 층이 아무리 많아도 한 층의 활성값만큼만 치르면 된다."
    ),
    "A.sent": (
        "이번에는 한 랭크가 실제로 보내는 양을 본다. {model} 모델을 {group}장에 나누고 마이크로배치 하나를 처리한다. "
        "{engine}의 방식과 링 알고리즘을 따르며, 가장 많이 보내는 랭크를 기준으로 한다. 시간은 두 가지 링크에서 "
        "예측했다. 여덟 장이 한 노드에 있으면 {in_node}, 여덟 노드에 한 장씩 있으면 {between_nodes}를 지난다."
    ),
    "A.link": ("{name}(한 방향 {rate}, {rate_known}; GPU {group}장 사이에서는 그 {efficiency}, {efficiency_known})"),
    "A.borrowed": "{tag}, {where}에서 빌려 옴",
    "A.forward": "순전파",
    "A.backward": "역전파",
    "A.messages": "통신 횟수",
    "A.sent_bytes": "보낸 양",
    "A.in_node": "노드 안",
    "A.between_nodes": "노드 간",
    "A.reconciled": (
        "왜 {loose_data} GB와 {loose_tensor} GB가 아닐까. 데이터 병렬부터 보면, 이 엔진은 그래디언트를 fp32로 "
        "합산한다. 파라미터 {real}개에 2바이트가 아니라 {grad}바이트씩이니 모두 {grads} GB다. {group}장의 링에서 한 "
        "랭크는 그 2·({group} − 1)/{group} = {ring}배를 보내므로 {data} GB가 된다. 텐서 병렬은 {loose_tensor} GB의 "
        "{ring}배인 {layers} GB를 층에서 보내고, 임베딩과 손실에서 {ends} GB를 더 보내 순전파가 {forward} GB다. "
        "역전파에서는 그 대신 출력층의 그래디언트를 보내 양이 같으므로 모두 {both} GB다. 파이프라인은 경계를 순전파와 "
        "역전파에서 한 번씩 건넌다."
    ),
    "A.same_step": (
        "위의 값은 랭크마다 마이크로배치 하나를 처리할 때의 양이다. 이때 데이터 병렬의 여덟 랭크는 시퀀스 "
        "{sequences}개를 나누어 처리하지만, 나머지 두 방식은 마이크로배치 하나를 처리할 뿐이다. 그래서 세 방식이 "
        "똑같이 시퀀스 {sequences}개를 한 스텝에 처리할 때를 비교한다. 시간은 스텝 시간이고, 괄호 안은 그중 GPU가 "
        "통신을 기다리는 시간, 곧 가려지지 않은 통신(exposed)이다(메모리에 들어가는지는 C에서 따진다)."
    ),
    "A.price": (
        "통신량이 곧 비용은 아니다. 몇 번 보내는지, 어떤 링크를 지나는지, 얼마나 계산 뒤에 가려지는지도 그만큼 "
        "중요하다. 셋 가운데 노드 안에서는 {in_node}이, 노드 간에는 {between_nodes}이 가장 빠르다."
    ),
    "A.bubble": (
        "파이프라인이 통신량 대신 치르는 대가는 버블(bubble, 거품)이다. 스테이지가 할 일 없이 노는 시간을 말한다. "
        "똑같은 스테이지 {stages}개에서 한 스테이지가 스텝의 몇 %를 노는지 마이크로배치 수에 따라 적으면 다음과 같다."
    ),
    "A.microbatches": "마이크로배치",
    "A.waits": "노는 비율",
    "A.overlaid": (
        "셋을 겹쳐 {cluster}에 올린다. 텐서 병렬 {tp} × 파이프라인 {pp} × 데이터 병렬 {dp}이고, 데이터 병렬 랭크마다 "
        "마이크로배치가 {microbatches}개라 한 스텝은 시퀀스 {sequences}개({tokens}토큰)다. 나누는 법은 그대로 두고 "
        "랭크를 놓는 자리만 세 가지로 바꾼다."
    ),
    "A.placement": "놓는 자리",
    "A.tp_in_node": "노드 안 TP, 노드 간 PP와 DP",
    "A.tp_over_two_nodes": "노드 안 DP, 두 노드에 걸친 TP",
    "A.tp_over_four_nodes": "노드 안 PP와 DP, 네 노드에 걸친 TP",
    "A.step": "스텝",
    "A.exposed": "가려지지 않은 통신",
    "A.times": "배수",
    "A.overlaid_reading": (
        "달라진 것은 랭크의 순서뿐이다. 가장 큰 통신을 가장 느린 링크에 놓으면 스텝이 {worst}배로 길어진다. (스텝 "
        "시간은 모두 예측값이다. 실제 시간은 적힌 값의 {low}배에서 {high}배 사이로 본다.)"
    ),
    # Part B
    "B.title": "B. 나눌 수 없는 부분이 한계를 정한다",
    "B.progress": "조각의 시간을 재는 중",
    "B.intro": (
        "{device}, torch {torch}에서 쟀다. {hidden} × {hidden} 크기의 층 {layers}개로 {rows}행을 순전파하고 "
        "역전파한다. 자료형은 {dtype}이고 기준 시간은 {base}다. 행을 실제로 1/N로 잘라, 모든 크기를 번갈아 가며 "
        "{repeats}번씩 쟀다."
    ),
    "B.share": "조각",
    "B.rows": "행",
    "B.median": "중앙값",
    "B.middle_half": "가운데 절반",
    "B.spread": "편차",
    "B.efficiency": "효율",
    "B.quiet": (
        "측정값이 고르다. 어느 크기에서나 가운데 절반의 편차가 중앙값의 {spread}를 넘지 않는다(허용 한계 {limit})."
    ),
    "B.noisy": (
        "작은 차이를 가리기에는 측정 잡음이 너무 컸다. 1/{n} 조각에서 가운데 절반의 편차가 중앙값의 {spread}로 허용 "
        "한계 {limit}를 넘었다. 다른 프로그램을 닫고 B를 다시 실행해 보자."
    ),
    "B.measured": (
        "측정한 속도 향상이다. 직렬 부분 s는 기준 시간에서 그대로 두고, 나머지에는 측정한 조각의 시간을 넣었다."
    ),
    "B.ideal": "암달의 법칙으로 구한 속도 향상, 1 / (s + (1 − s)/N):",
    "B.serial": "직렬 비율",
    "B.limit": "한계",
    "B.why_slower": (
        "두 표의 차이는 위의 효율에서 온다. 행을 32분의 1로 자르자 기준 속도의 {efficiency}밖에 나오지 않았다. 조각이 "
        "작으면 칩의 연산기를 다 채우지 못하고, 행이 줄어도 가중치는 모두 읽고 그 그래디언트는 모두 써야 한다."
    ),
    "B.why_faster": (
        "두 표의 차이는 위의 효율에서 온다. 행을 32분의 1로 자르자 기준 속도의 {efficiency}가 나왔다. 이번에는 "
        "느려지지 않았는데, 작은 조각이 캐시에 들어갔거나 측정값이 흔들린 탓이다."
    ),
    "B.why_noisy": (
        "두 표의 차이는 위의 효율에서 온다. 행을 32분의 1로 자르자 기준 속도의 {efficiency}가 나왔지만, 잡음이 이만큼 "
        "크면 이 값으로 말할 수 있는 것은 적다. 보통은 100%보다 낮다. 조각이 작으면 칩의 연산기를 다 채우지 못하고, "
        "행이 줄어도 가중치는 모두 읽고 그 그래디언트는 모두 써야 하기 때문이다."
    ),
    "B.doubling": (
        "직렬 비율이 {serial}일 때 {before}장을 {after}장으로 한 번 더 늘리면 {measured}배를 얻는다(편차가 {spread} "
        "이하인 측정값의 가운데 절반으로 보면 {low}배에서 {high}배 사이다. 법칙으로는 {ideal}배이고, 원본이 다른 "
        "장치에서 잰 값은 {lesson}배다). 그 대신 {before}장 그대로 직렬 비율을 {serial}에서 {smaller}로 줄이면 "
        "{cutting}배를 얻는다."
    ),
    "B.doubling_noisy": (
        "직렬 비율이 {serial}일 때 {before}장을 {after}장으로 한 번 더 늘리면 법칙으로는 {ideal}배를 얻는다(원본이 "
        "다른 장치에서 잰 값은 {lesson}배다). 여기서 잰 {measured}배는 믿을 만하지 않다. 편차가 {spread}에 이르러, "
        "측정값의 가운데 절반만 보아도 {low}배에서 {high}배까지 나올 수 있다. 그 대신 {before}장 그대로 직렬 비율을 "
        "{serial}에서 {smaller}로 줄이면 법칙으로는 {cutting}배를 얻는다."
    ),
    # Part C
    "C.title": "C. 메모리 때문에도 나눈다",
    "C.progress": "학습 한 스텝을 재는 중",
    "C.intro": (
        "{device}, torch {torch}에서 쟀다. fp32 파라미터 {parameters}개({hidden} × {hidden} 크기의 층 {layers}개)를 "
        "AdamW로 한 스텝 학습하면서 텐서의 저장 공간을 빠짐없이 한 번씩 셌다."
    ),
    "C.what": "항목",
    "C.memory": "메모리",
    "C.multiple": "파라미터 대비",
    "C.allocator": "할당기",
    "C.params": "파라미터",
    "C.grads": "그래디언트",
    "C.optimizer_states": "AdamW의 두 모멘트",
    "C.total": "합계",
    "C.activations": "+ 활성값",
    "C.step_counters": "이 밖에 AdamW는 텐서마다 스텝 수를 저장한다. 모두 {bytes}바이트다.",
    "C.workspace": (
        "할당기로 본 그래디언트에는 첫 행렬곱이 잡아 둔 작업 공간 {workspace} MB가 섞여 있다. 이를 빼면 {grads} MB다."
    ),
    "C.activations_grow": (
        "활성값은 {rows}행을 역전파하는 데 필요한 값이다. 배치를 키우면 활성값은 늘어나지만 위의 넷은 그대로다."
    ),
    "C.peaks": (
        "최대 사용량을 보면, 같은 행을 학습 없이 돌릴 때는 {inference} MB로 파라미터의 {inference_ratio}배다. 학습 한 "
        "스텝은 {training} MB로 파라미터의 {training_ratio}배이고, 학습하지 않을 때 최대 사용량의 {times}배다."
    ),
    "C.peak_optimizer": (
        "합계와 활성값을 더하면 {together} MB, 파라미터의 {together_ratio}배지만 이 둘이 한꺼번에 있는 순간은 없다. "
        "역전파는 그래디언트를 만들면서 활성값을 해제하기 때문이다. 최대 사용량은 그 뒤 옵티마이저 스텝에서 나왔다. "
        "합계보다 {over} MB 많은데, 가중치 행렬 {layers}개 가운데 {matrices}개만큼의 임시 사본이 생긴 것이다."
    ),
    "C.peak_backward": (
        "합계와 활성값을 더하면 {together} MB, 파라미터의 {together_ratio}배다. 최대 사용량은 역전파에서 나왔고, "
        "역전파는 그래디언트를 만들면서 활성값을 해제한다."
    ),
    "C.moment.optimizer": "옵티마이저 스텝",
    "C.moment.backward": "역전파",
    "C.zero": (
        "이것도 나눌 수 있을까. fp32 파라미터가 70억 개인 모델에서, 무엇을 나누어 갖느냐에 따른 GPU 한 장의 "
        "메모리다(ZeRO)."
    ),
    "C.sharded": "나눈 것",
    "C.none": "없음",
    "C.optimizer": "옵티마이저",
    "C.optimizer+grads": "+ 그래디언트",
    "C.optimizer+grads+params": "+ 파라미터",
    "C.zero_sent": (
        "그 대가로 {model}의 한 랭크가 한 스텝에 보내는 양이다. fp32이고 {engine}의 방식을 따랐다(괄호 안은 통신 횟수)."
    ),
    "C.refused": "엔진이 거절한 까닭: {reasons}",
    "C.calls": (
        "횟수가 다른 까닭은 이렇다. 아무것도 나누지 않으면 그래디언트 버킷 {all_reduces}개를 하나씩 all-reduce한다. "
        "옵티마이저를 나누면 여전히 버킷 단위로 그래디언트를 {buckets_reduced}번 reduce-scatter하고 파라미터를 "
        "{buckets_gathered}번 all-gather한다. 그래디언트까지 나누면 부분(각 층과 모델의 양 끝)마다 통신하여 "
        "reduce-scatter가 {parts_reduced}번, all-gather가 {parts_gathered}번이다. 파라미터까지 나누면 부분마다 "
        "파라미터를 순전파와 역전파에서 한 번씩 모두 두 번 모으고 그래디언트를 한 번 합산한다. all-gather가 "
        "{gathered_twice}번, reduce-scatter가 {reduced_once}번이다."
    ),
    "C.trade": (
        "{gpus}장에서 모두 나누면 한 장의 {before} GB가 {after} GB로 줄고, 보내는 양은 {times}배가 된다. 통신을 늘려 "
        "메모리를 사는 셈이다."
    ),
    # The misconceptions
    "M.title": "다섯 가지 오해와 숫자의 대답",
    "M.twice_the_gpus": (
        "“GPU가 두 배면 속도도 두 배다.” 속도를 정하는 것은 직렬 부분이다. 직렬 비율이 {serial}이면 {gpus}장은 한 "
        "장보다 {speedup}배 빠르고, 마지막으로 두 배를 늘려 얻은 것은 {doubling}배다(B의 측정값. 법칙으로는 "
        "{ideal_speedup}배와 {ideal_doubling}배이고, 편차는 {spread} 이하다). 몇 장을 붙여도 {limit}배를 넘지 못한다."
    ),
    "M.twice_the_gpus_noisy": (
        "“GPU가 두 배면 속도도 두 배다.” 속도를 정하는 것은 직렬 부분이다. 암달의 법칙에 따르면 직렬 비율이 {serial}일 "
        "때 {gpus}장은 한 장보다 {ideal_speedup}배 빠르고, 마지막으로 두 배를 늘려 얻는 것은 {ideal_doubling}배다. "
        "(B에서 잰 값은 {speedup}배와 {doubling}배지만 편차가 {spread}에 이르러 믿을 만하지 않다.) 몇 장을 붙여도 "
        "{limit}배를 넘지 못한다."
    ),
    "M.least_volume": (
        "“적게 보내는 방식이 가장 좋다.” 느슨한 셈법으로 주고받는 양은 {bytes}다. 그런데 GPU {gpus}장으로 시퀀스 "
        "{sequences}개를 한 스텝에 처리하면 노드 안에서는 {in_node}, 노드 간에는 {between_nodes}가 걸린다. 노드 "
        "안에서는 {first_in_node}이, 노드 간에는 {first_between_nodes}이 가장 빠르다. 통신량만이 아니라 횟수와 링크와 "
        "기다리는 시간까지 따져야 한다."
    ),
    "M.memory_is_parameters": (
        "“메모리는 파라미터 크기만큼 든다.” 학습은 그 {kept}배를 계속 들고 있고, 여기서는 역전파가 해제할 때까지 "
        "활성값이 {activations}배 더 든다. 스텝의 최대 사용량은 {moment}에서 파라미터의 {training}배였고, 학습하지 "
        "않을 때의 최대 사용량은 {inference}배였다."
    ),
    "M.zero_is_free": (
        "“ZeRO는 공짜다.” {gpus}장에서 한 장의 메모리가 {before} GB에서 {after} GB로 줄어드는 동안, 한 랭크가 한 "
        "스텝에 보내는 양은 {sent_before} GB에서 {sent_after} GB로 늘어난다."
    ),
    "M.a_real_cluster": (
        "“실제 클러스터도 이 숫자대로 움직인다.” 실제는 더 나쁘다. A에서 셋을 겹친 작업의 한 스텝(시퀀스 "
        "{sequences}개, {tokens}토큰)은 한 장에 들어간다고 쳐도 {one}가 걸리고, {gpus}로 나누면 {arithmetic}다. "
        "{cluster}에서 예측한 값은 {predicted}({low}에서 {high} 사이)로 그 {worse}배다. {gpus}장으로 {speedup}배를 "
        "얻는 셈이다. 스텝 가운데 가려지지 않은 통신이 {exposed}, 파이프라인 버블이 {bubble}(고르지 않은 "
        "스테이지 탓은 {imbalance})이고, 메시지의 지연이 없다면 {latency}만큼 짧아진다. 암달의 법칙으로 옮기면 직렬 "
        "비율 {serial}에 해당한다."
    ),
    # What is refused
    "unknown": "수업에 {part} 부분은 없다. {parts}가 있다",
    "no_torch": "{part} 부분은 PyTorch로 재는데 설치되어 있지 않다: pip install 'nanum[torch]' "
    "(소스 폴더에서는 pip install -e '.[torch]')",
}

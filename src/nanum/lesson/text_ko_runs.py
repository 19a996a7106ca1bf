"""The words of parts D and E in Korean. `text_en_runs` has the same keys with the same fields."""

TEXT: dict[str, str] = {
    # Part D
    "D.title": "D. 데이터 병렬을 실제로 돌려 본다",
    "D.progress": "모든 방식을 한 스텝씩 번갈아 재는 중",
    "D.intro": (
        "{device}, torch {torch}에서 {backend}로 통신하며 쟀다. {layers}층, 은닉 크기 {hidden}, 파라미터 "
        "{parameters}개({precision})인 디코더다. 한 스텝은 {seq}토큰짜리 시퀀스 {sequences}개를 AdamW로 학습한다. "
        "스레드를 하나씩 쓰는 프로세스 N개에 PyTorch의 DistributedDataParallel이 시퀀스를 나누어 주며, N이 달라져도 "
        "한 스텝의 일은 그대로다."
    ),
    "D.turns": (
        "아래에서 재는 것은 모두 한꺼번에 준비해 두고 한 스텝씩 번갈아 {rounds}바퀴를 돌렸다. 그동안 기계에 무슨 일이 "
        "있든 모두가 똑같이 겪는다. {need}바퀴 이상이 같은 쪽을 가리킬 때만 차이로 친다. 우연히 그렇게 될 확률은 "
        "20분의 1이 안 된다. 측정값의 가운데 절반은 중앙값의 {spread}까지 흩어져 있다."
    ),
    "D.turns_few": (
        "아래에서 재는 것은 모두 한꺼번에 준비해 두고 한 스텝씩 번갈아 돌렸다. 그동안 기계에 무슨 일이 있든 모두가 "
        "똑같이 겪는다. 다만 시간 안에 {rounds}바퀴밖에 돌지 못해 차이와 우연을 가릴 수 없으므로, 아래에서는 차이가 "
        "있다고 말하지 않는다. 측정값의 가운데 절반은 중앙값의 {spread}까지 흩어져 있다. 다른 프로그램을 닫고 D를 다시 "
        "실행해 보자."
    ),
    "D.cores": "코어가 {cores}개이므로 프로세스가 {n}개를 넘으면 코어를 함께 쓰게 되고, 그것은 더는 나누기가 아니다.",
    "D.cores_left": "코어 {cores}개 가운데 많아야 {n}개를 쓴다.",
    "D.cores_one": "여기에는 코어가 하나뿐이라 두 프로세스가 함께 쓴다. 아래는 나눈 결과가 아니라 함께 쓴 결과다.",
    "D.formula": (
        "공식부터 보자. N개의 프로세스는 저마다 시퀀스의 1/N을 계산하고, 파라미터는 전부 갱신하며, 그래디언트를 "
        "all-reduce한다. 곧 t(N) = 1/N의 순전파와 역전파 + 옵티마이저 + 계산 뒤에 가려지지 않은 통신이다. "
        "그래디언트는 4바이트 × {parameters} = {grads} MB이고, 링에서 한 프로세스는 그 2(N − 1)/N배를 보낸다. N = "
        "{n}이면 {wire} MB다."
    ),
    "D.apart": (
        "각 항을 따로 잰 값은 이렇다. 한 프로세스가 시퀀스를 모두 처리하면 {one}, 그 1/{n}만 처리하면 {share}(순전파 "
        "{forward}, 역전파 {backward}, 옵티마이저 {optimizer}), all-reduce만 하면 {reduce}가 걸린다. 따라서 t({n})의 "
        "값은 역전파가 통신을 가릴 수 있는 만큼 다 가리면 {low}, 하나도 가리지 못하면 {high}여야 한다. 속도 향상을 S = "
        "t(1)/t(N)이라 하면 직렬 비율 s = (1/S − 1/N) / (1 − 1/N)(카프–플랫)은 {serial_low}와 {serial_high} 사이여야 "
        "한다."
    ),
    "D.run": "PyTorch의 기본 버킷으로 실제로 돌린 결과다(마지막 열은 여러 바퀴에 비추어 본 s의 범위).",
    "D.speedup": "속도 향상",
    "D.likely": "s의 범위",
    "D.crowded": (
        "다른 프로그램도 코어를 쓰고 있었다. 아무것도 기다리지 않는 순전파에서 프로세스 {n}개는 저마다 시간의 "
        "{running}만 실제로 돌았다(혼자일 때는 {one}). 그 탓에 늘어난 시간도 s에 들어 있다. 다른 프로그램을 닫으면 s는 "
        "작아진다."
    ),
    "D.difference_held": "차이는 없다. {measured}는 공식의 {range} 안에 있다.",
    "D.difference_slower": (
        "차이를 보면, {measured}는 공식의 {range}보다 {percent} 길고 {rounds}바퀴 가운데 {agree}바퀴에서 그 위에 있다. "
        "공식의 각 항은 하나씩 따로 잰 값이다. 프로세스 {n}개가 함께 돌면 메모리와 캐시를 다투고, 메시지를 나르는 "
        "스레드나 다른 프로그램과 코어도 나누어 쓴다."
    ),
    "D.difference_faster": (
        "차이를 보면, {measured}는 공식의 {range}보다 {percent} 짧고 {rounds}바퀴 가운데 {agree}바퀴에서 그 아래에 "
        "있다. 따로 잰 항이 스텝 안에서보다 오래 걸린 셈이다."
    ),
    "D.difference_noise": (
        "차이를 보면, {measured}는 공식의 {range}에서 {percent} 벗어났고 {rounds}바퀴 가운데 {agree}바퀴가 그러했다. "
        "잡음이 아니라고 말하기에는 모자란다."
    ),
    "D.parts": (
        "s = {serial}는 세 가지를 더한 값이다. 모든 프로세스가 빠짐없이 되풀이하는 옵티마이저가 {optimizer}, 조각의 "
        "순전파와 역전파가 고르게 나눈 몫보다 더 걸린 시간이 {pieces}, 통신과 함께 도는 프로세스끼리의 경쟁이 "
        "{exchange}다."
    ),
    "D.law_noisy": (
        "여러 바퀴에 비추어 보면 s는 {range} 어디든 될 수 있어 범위가 넓다. 아래는 중앙값이 말하는 것일 뿐, 다시 재면 "
        "달라질 수 있다."
    ),
    "D.law": "s = {serial}({range})로 암달의 법칙을 이어 간다. 프로세스 수에 따른 속도 향상:",
    "D.ceiling": (
        "몇 개를 붙여도 1/s = {limit}배를 넘지 못하고, 1 + 1/s = {half}개에서 효율이 절반이 된다. 이 법칙은 s가 "
        "그대로라고 본다. 통신과 경쟁은 N과 함께 커질 수 있으므로 이 곡선은 예측이 아니라 한계다."
    ),
    "D.no_speedup": (
        "s = {serial}({range})에서는 암달의 법칙으로 이어 갈 것이 없다. 프로세스 {n}개가 하나보다 빠르지 않았다. "
        "나누어 아낀 만큼을 통신과 경쟁에 도로 쓴 것이다."
    ),
    "D.no_serial": (
        "s = {serial}({range})에서는 암달의 법칙에 한계가 없다. 프로세스 {n}개가 하나보다 {speedup}배 빨랐다. 작은 "
        "조각이 캐시에 더 잘 들어갔거나 잡음이다."
    ),
    "D.exchanges": (
        "s를 줄이려는 기법은 세 가지다(여기서는 N = {n}). 버킷팅은 여러 텐서의 그래디언트를 한 메시지로 묶어 보내고, "
        "겹치기(overlap)는 역전파가 아직 계산하는 동안 보내며, bf16으로 보내면 양이 절반이 된다. 공식에 따르면 끝에 "
        "한 번에 보낼 때는 조금도 가려지지 않고, 도중에 보내면 역전파 시간만큼까지 가려지며, bf16은 가려야 할 것을 "
        "절반으로 줄인다."
    ),
    "D.exchange": "통신",
    "D.by_formula": "공식",
    "D.as_measured": "측정값",
    "D.off": "차이",
    "D.each_tensor": "텐서마다",
    "D.at_once": "끝에 한 번",
    "D.buckets": "버킷",
    "D.bf16": "버킷, bf16",
    "D.effect.bucketing": "버킷팅(메시지 {calls_before}개에서 {calls_after}개로)",
    "D.effect.overlap": "겹치기(끝에 한 번 보내기에서 도중에 버킷으로 보내기로)",
    "D.effect.bf16": "bf16으로 보내기({sent_before} MB에서 {sent_after} MB로)",
    "D.told_faster": (
        "{effect}: 스텝이 {percent} 짧아졌고 {rounds}바퀴 가운데 {agree}바퀴가 그러했다. s는 {before}에서 {after}로 "
        "줄었다."
    ),
    "D.told_slower": (
        "{effect}: 스텝이 {percent} 길어졌고 {rounds}바퀴 가운데 {agree}바퀴가 그러했다. s는 {before}에서 {after}로 "
        "늘었다."
    ),
    "D.told_noise": (
        "{effect}: 잡음과 가릴 만한 차이가 없다. 중앙값은 {percent} 다르지만, 뒤쪽이 더 빨랐던 것은 {rounds}바퀴 "
        "가운데 {faster}바퀴다."
    ),
    "D.on_a_cpu": (
        "이것은 CPU에서 나온 답이다. 여기서는 계산하는 코어에서 도는 스레드가 메시지를 나르므로, 가려진 통신도 그것을 "
        "가리는 계산의 시간을 빼앗는다. bf16으로 바꾸는 것도 일이다. GPU 사이에서는 네트워크 카드가 메시지를 나른다. "
        "거기서는 계산에 견주어 통신이 더 길어서, 가리거나 절반으로 줄여 얻는 것도 더 크다."
    ),
    # Part E
    "E.title": "E. 세 가지 방식을 실제로 돌려 본다",
    "E.progress": "방식마다 학습하는 중",
    "E.intro": (
        "이번에는 PyTorch가 주고받고 들고 있는 것을 센다. 랭크 {ranks}개에서(torch {torch}, {backend}) 세 방식으로 "
        "똑같은 스텝을 학습한다. {seq}토큰짜리 시퀀스 {sequences}개, {layers}층, 은닉 크기 {hidden}, 어휘 {vocab}개, "
        "파라미터 {parameters}개({precision})인 디코더다. 통신은 PyTorch가 {backend}에 넘기는 곳에서, 메모리는 할당할 "
        "때마다 세고, 소켓으로 들어온 양은 커널에 묻는다. 한 랭크가 한 스텝에 보내는 양을 공식으로 먼저 구해 보자."
    ),
    "E.formula.data_parallel": (
        "데이터 병렬(DDP). 역전파가 끝나면 각 랭크에는 파라미터마다 그래디언트가 하나씩, {parameters} × 4바이트 = "
        "{payload}바이트 있지만, 제 몫의 시퀀스에서 나온 것뿐이다. all-reduce의 링은 이것을 더하고 그 합을 다시 "
        "돌리므로, 전체의 (N − 1)/N을 두 번 보낸다. N = {n}이면 2(N − 1)/N · {payload} = {bytes}바이트다."
    ),
    "E.formula.tensor_parallel": (
        "텐서 병렬. 층마다 어텐션과 피드포워드가 저마다 랭크에 걸친 합으로 끝나고, 역전파에서는 그 입력의 "
        "그래디언트가 다시 그런 합이다. 층마다 all-reduce가 4번이니 {layers}층이면 {exchanges}번이고, 한 번의 크기는 "
        "시퀀스 × 토큰 × 은닉 크기 × 4바이트 = {payload}바이트다. N = {n}이면 2(N − 1)/N · {exchanges} · {payload} = "
        "{bytes}바이트다."
    ),
    "E.formula.pipeline": (
        "파이프라인(1F1B). 첫 랭크는 마이크로배치 {exchanges}개에 대해 마지막 층의 출력을 {payload}바이트씩 넘기고, "
        "둘째 랭크는 그 그래디언트를 돌려보낸다. 어느 쪽이든 {exchanges} · {payload} = {bytes}바이트를 보낸다."
    ),
    "E.run": (
        "이제 실제로 돌린다. ‘예측’은 nanum이 장부에서 읽은 값이고 ‘실측’은 PyTorch가 한 일을 센 값이다. 한 랭크가 "
        "보낸 바이트:"
    ),
    "E.formula": "공식",
    "E.predicted": "예측",
    "E.counted": "실측",
    "E.difference": "차이",
    "E.equal": (
        "예측과 실측의 차이는 모든 줄에서 0이다. 모든 랭크의 통신 {calls}번에 대해 종류, 축, 단계, 자료형, 그룹, 횟수, "
        "바이트가 모두 같다."
    ),
    "E.differs": ("예측과 실측이 다르다: {ways}."),
    "E.rows_of_way": "{way} {rows}줄",
    "E.beyond": "공식이 전부는 아니다. {said}",
    "E.beyond.data_parallel": ("DDP는 순전파에 앞서 첫 랭크의 위치 표를 다른 랭크에 보낸다({bytes}바이트)."),
    "E.beyond.tensor_parallel": (
        "텐서 병렬은 임베딩의 출력과 출력층 입력의 그래디언트도 합산하고, 어휘에 걸쳐 나뉜 로짓도 모은다"
        "({bytes}바이트)."
    ),
    "E.beyond.pipeline": "파이프라인은 공식보다 {bytes}바이트를 더 보낸다.",
    "E.sockets": (
        "모든 랭크의 소켓으로 들어온 양은 gloo의 알고리즘으로 예측한 것보다 메시지의 헤더만큼 조금 많다. {said}."
    ),
    "E.sockets_of_way": "{way} {counted}바이트(예측 {predicted})",
    "E.no_sockets": "이 시스템에서는 소켓으로 들어온 양을 알 수 없어, 여기서는 확인하지 않았다.",
    "E.way": "방식",
    "E.held": (
        "각 랭크가 들고 있는 메모리의 실측값(MB)이다(‘저장’은 한 번의 순전파가 역전파를 위해 남겨 두는 양이다. "
        "파이프라인에서는 여럿이 겹치므로 최대 사용량만 읽는다). 마지막 열은 예측과 견준 결과다."
    ),
    "E.rank": "랭크",
    "E.one_process": "한 프로세스",
    "E.params": "파라미터",
    "E.grads": "그래디언트",
    "E.optimizer_states": "옵티마이저",
    "E.saved": "저장",
    "E.peak": "최대",
    "E.agrees": "같음",
    "E.peak_off": "최대 {percent}",
    "E.disagrees": "다름",
    "E.held_equal": (
        "파라미터, 그래디언트, AdamW의 상태, 순전파가 저장해 두는 것은 바이트까지 예측과 같고(값 {count}개), 최대 "
        "사용량은 {percent} 안에서 같다."
    ),
    "E.held_differs": (
        "바이트까지 같아야 할 값 {count}개 가운데 {wrong}개가 다르다. 최대 사용량의 차이는 {percent} 이내다."
    ),
    "E.states": (
        "한 프로세스가 들고 있는 파라미터와 그래디언트와 AdamW의 상태 가운데, 한 랭크가 드는 양은 데이터 병렬에서 "
        "{data}, 텐서 병렬에서 {tensor}, 파이프라인에서 {pipeline}다. 데이터 병렬은 이것을 나누지 않고 복사한다"
        "(나누는 것은 C에서 본 ZeRO다)."
    ),
    "E.whole_gradient": (
        "(텐서 병렬에서 그래디언트가 파라미터보다 큰 까닭은, PyTorch가 임베딩의 그래디언트를 어휘 전체에 대해 만들고 "
        "한 랭크의 몫은 그 일부를 가리키는 뷰로 남기 때문이다.)"
    ),
    "E.same": (
        "그리고 세 방식은 모두 같은 모델을 학습한다. {steps}스텝 동안 손실은 한 프로세스의 값과 {loss} 안에서 같고, "
        "첫 스텝의 그래디언트는 {gradient} 안에서 같다."
    ),
    "E.not_same": (
        "그러나 같은 모델을 학습하지는 못했다. {steps}스텝 동안 손실은 한 프로세스의 값과 {loss}까지, 첫 스텝의 "
        "그래디언트는 {gradient}까지 벗어났다."
    ),
    "E.bad_news": (
        "모두 예측대로인 것은 아니다: {checks}. 나쁜 소식이므로 이 명령은 1로 끝난다. 이런 실행 하나하나는 `nanum "
        "verify`로 볼 수 있다."
    ),
}

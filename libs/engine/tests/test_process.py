"""What every process of vLLM is prepared with."""

import subprocess
import sys
import textwrap


def test_process_ends_when_its_parent_is_killed() -> None:
    # A grandchild: the one in the middle starts it as vLLM starts its engine, tells its id and dies.
    program = textwrap.dedent("""
        import multiprocessing, os, time
        from shoal_engine.vllm.process import prepare_process

        def work(pipe):
            prepare_process()
            pipe.send(os.getpid())
            time.sleep(60)

        if __name__ == "__main__":
            context = multiprocessing.get_context("fork")
            ours, theirs = context.Pipe()
            context.Process(target=work, args=(theirs,)).start()
            print(ours.recv(), flush=True)
            os._exit(9)
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    # The orphan holds the output pipe open; ``run`` returns only once it is gone too.
    assert done.returncode == 9
    assert done.stdout.strip().isdigit()

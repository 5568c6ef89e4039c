//! The worker's end of the connection to the test that started it.

use std::{
    io::{self, BufRead, Write},
    process, thread,
    time::Duration,
};

use tokio::sync::mpsc;

/// The exit code of a worker that did not finish by itself after its input had ended.
pub const ORPHANED: i32 = 86;

/// Time limit for a worker to finish after its input has ended.
const GRACE: Duration = Duration::from_secs(5);

/// The test that started this worker. It sends lines, and closes the input as the order to finish;
/// its death closes the input too.
#[derive(Debug)]
pub struct Parent {
    lines: mpsc::UnboundedReceiver<String>,
}

impl Parent {
    /// Follows the standard input of this process; once it has ended, the process ends as well,
    /// five seconds later at most. Call it once.
    pub fn follow() -> Self {
        let (sender, lines) = mpsc::unbounded_channel();
        // A separate thread: neither a blocked runtime nor a hanging lock can keep it from noticing
        // the end.
        thread::spawn(move || {
            for line in io::stdin().lock().lines().map_while(Result::ok) {
                // The receiver may be gone.
                let _ = sender.send(line);
            }
            drop(sender);
            thread::sleep(GRACE);
            process::exit(ORPHANED);
        });
        Self { lines }
    }

    /// The next line from the test; `None` is the order to finish. Cancel safe.
    pub async fn line(&mut self) -> Option<String> {
        self.lines.recv().await
    }

    /// Waits for the order to finish.
    pub async fn finished(&mut self) {
        while self.line().await.is_some() {}
    }

    /// Sends a line to the test.
    ///
    /// # Panics
    /// When the test is gone.
    pub fn say(&self, line: impl AsRef<str>) {
        let mut output = io::stdout().lock();
        writeln!(output, "{}", line.as_ref())
            .and_then(|()| output.flush())
            .expect("the test reads our output");
    }
}

//! Processes of this same binary: a real fleet, on one machine.
//!
//! Parent and child talk in lines over the child's standard input and output. The parent alone holds the other end of the
//! input: when it is closed, because the parent is done or because it died, the child comes to its end.

use std::{
    ffi::OsStr,
    fmt,
    io::{self, Write},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context, bail};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Lines, stdin},
    process::{ChildStdin, ChildStdout, Command},
    time::timeout,
};

/// A child that does not end within this time after its input was closed is killed.
const PATIENCE: Duration = Duration::from_secs(30);

/// A running process of this same binary. Dropping it kills it.
#[derive(Debug)]
pub struct Child {
    process: tokio::process::Child,
    orders: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Child {
    /// Starts this binary once more, with `args`. What it writes to standard error goes to ours.
    ///
    /// # Errors
    /// If the process cannot be started.
    pub fn spawn<A: AsRef<OsStr>>(args: impl IntoIterator<Item = A>) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("cannot find the file of this program")?;
        let mut process = Command::new(program)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Ctrl-C in a terminal reaches a whole process group; ending the children properly is the parent's part.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .context("cannot start a child process")?;
        let (Some(orders), Some(output)) = (process.stdin.take(), process.stdout.take()) else {
            bail!("a child process has no pipes");
        };
        Ok(Self {
            process,
            orders,
            lines: BufReader::new(output).lines(),
        })
    }

    /// The next line that the child says.
    ///
    /// # Errors
    /// If the child ends instead; why is on standard error.
    pub async fn line(&mut self) -> anyhow::Result<String> {
        match self
            .lines
            .next_line()
            .await
            .context("cannot read from a child process")?
        {
            Some(line) => Ok(line),
            None => bail!(
                "a child process ended before its time: {}",
                self.process.wait().await?
            ),
        }
    }

    /// Says one line to the child.
    ///
    /// # Errors
    /// If the child has ended.
    pub async fn tell(&mut self, order: &str) -> anyhow::Result<()> {
        let sent = self.orders.write_all(format!("{order}\n").as_bytes()).await;
        sent.context("a child process ended before its time")
    }

    /// Closes the child's input, and gives the line that it says in parting once it has ended; none if it says nothing.
    ///
    /// # Errors
    /// If the child fails, or does not end within 30 s; then it is killed.
    pub async fn end(self) -> anyhow::Result<Option<String>> {
        let Self {
            mut process,
            orders,
            mut lines,
        } = self;
        drop(orders);
        let parting = async {
            let mut last = None;
            while let Some(line) = lines.next_line().await? {
                last = Some(line);
            }
            Ok::<_, io::Error>((last, process.wait().await?))
        };
        let (last, status) = timeout(PATIENCE, parting)
            .await
            .context("a child process does not end")??;
        if !status.success() {
            bail!("a child process failed: {status}");
        }
        Ok(last)
    }
}

/// In a child: says one line to the parent. A parent that is no more does not hear it, which is no fault of the child's.
pub fn say(line: impl fmt::Display) {
    let _ = writeln!(io::stdout(), "{line}");
}

/// In a child: the next line that the parent says; none if it hung up.
///
/// # Errors
/// If standard input cannot be read.
pub async fn order() -> anyhow::Result<Option<String>> {
    BufReader::new(stdin())
        .lines()
        .next_line()
        .await
        .context("cannot read orders")
}

/// In a child: waits until the parent closes the child's input, or is no more.
pub async fn parent_hangs_up() {
    // An input that cannot be read is as good as a closed one.
    let _ = stdin().read_to_end(&mut Vec::new()).await;
}

//! Everything that a server executes, as `MONITOR` reports it: commands, and those within scripts
//! (`lua]`).

use lock_tests::{RedisServer, unique};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpStream,
    sync::Mutex,
};

pub(super) struct Monitor(Mutex<(BufReader<TcpStream>, Vec<String>)>);

impl Monitor {
    /// From now on.
    pub(super) async fn of(server: &RedisServer) -> Self {
        let mut stream = BufReader::new(TcpStream::connect(server.addr()).await.unwrap());
        stream.write_all(b"MONITOR\r\n").await.unwrap();
        let mut line = String::new();
        stream.read_line(&mut line).await.unwrap();
        assert_eq!(line, "+OK\r\n");
        Self(Mutex::new((stream, Vec::new())))
    }

    /// All lines up to now.
    pub(super) async fn lines_so_far(&self, server: &RedisServer) -> Vec<String> {
        let (stream, lines) = &mut *self.0.lock().await;
        let end = unique("end");
        server.command(&["ECHO", &end]).await;
        loop {
            let mut line = String::new();
            assert_ne!(
                stream.read_line(&mut line).await.unwrap(),
                0,
                "the server has gone"
            );
            if line.contains(&end) {
                return lines.clone();
            }
            lines.push(line);
        }
    }
}

/// The words of a line, without the quotes.
pub(super) fn words(line: &str) -> Vec<&str> {
    let command = line.split_once("] ").map_or("", |(_, command)| command);
    command
        .trim_end()
        .trim_matches('"')
        .split("\" \"")
        .collect()
}

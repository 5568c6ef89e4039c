//! Sentinels with scripted replies.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::broadcast,
};

/// The state that a Sentinel reports.
#[derive(Clone)]
pub(super) struct View {
    /// The address that it gives to clients.
    pub(super) primary: (String, u16),
    /// The address in its description of the primary. It differs while the Sentinel leads a
    /// failover.
    pub(super) watched: (String, u16),
    pub(super) epoch: u64,
}

impl View {
    pub(super) fn of(primary: SocketAddr, epoch: u64) -> Self {
        let primary = (primary.ip().to_string(), primary.port());
        Self {
            watched: primary.clone(),
            primary,
            epoch,
        }
    }
}

/// A Sentinel with scripted replies.
pub(super) struct Fake {
    pub(super) address: SocketAddr,
    view: Arc<Mutex<View>>,
    news: broadcast::Sender<String>,
    hang_up: broadcast::Sender<()>,
}

impl Fake {
    pub(super) async fn start(view: View) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (view, news, hang_up) = (
            Arc::new(Mutex::new(view)),
            broadcast::Sender::new(16),
            broadcast::Sender::new(1),
        );
        let (shared, sender, end) = (view.clone(), news.clone(), hang_up.clone());
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (served, mut end) = (
                    serve(stream, shared.clone(), sender.clone()),
                    end.subscribe(),
                );
                tokio::spawn(async move {
                    tokio::select! {
                        () = served => {}
                        _ = end.recv() => {}
                    }
                });
            }
        });
        Self {
            address,
            view,
            news,
            hang_up,
        }
    }

    /// Starts three Sentinels with the same view.
    pub(super) async fn three(view: &View) -> [Self; 3] {
        [
            Self::start(view.clone()).await,
            Self::start(view.clone()).await,
            Self::start(view.clone()).await,
        ]
    }

    /// Changes the view without a notification.
    pub(super) fn believe(&self, view: &View) {
        *self.view.lock().unwrap() = view.clone();
    }

    /// Changes the view and notifies the subscribers. Returns their number.
    pub(super) fn switch(&self, view: &View) -> usize {
        let old = std::mem::replace(&mut *self.view.lock().unwrap(), view.clone());
        let ((from, from_port), (to, to_port)) = (old.primary, &view.primary);
        self.news
            .send(format!("mymaster {from} {from_port} {to} {to_port}"))
            .unwrap_or(0)
    }
}

impl Fake {
    /// Closes all its connections.
    pub(super) fn hang_up(&self) {
        let _ = self.hang_up.send(());
    }
}

/// A URL that names all of them.
pub(super) fn url_of(sentinels: &[Fake]) -> String {
    let hosts: Vec<_> = sentinels
        .iter()
        .map(|sentinel| sentinel.address.to_string())
        .collect();
    format!("redis+sentinel://{}/mymaster", hosts.join(","))
}

fn bulk(text: &str) -> String {
    format!("${}\r\n{text}\r\n", text.len())
}

async fn serve(mut stream: TcpStream, view: Arc<Mutex<View>>, news: broadcast::Sender<String>) {
    let (mut heard, mut buffer) = (String::new(), [0; 4096]);
    let mut listening: Option<broadcast::Receiver<String>> = None;
    loop {
        let reply = tokio::select! {
            read = stream.read(&mut buffer) => {
                let Ok(1..) = read else { return };
                heard.push_str(&String::from_utf8_lossy(&buffer[..read.unwrap()]));
                if heard.to_uppercase().contains("SUBSCRIBE\r\n") {
                    heard.clear();
                    listening = Some(news.subscribe());
                    format!("*3\r\n{}{}:1\r\n", bulk("subscribe"), bulk("+switch-master"))
                } else if heard.contains("GET-MASTER-ADDR-BY-NAME") {
                    // Both queries arrive together.
                    heard.clear();
                    let View { primary, watched, epoch } = view.lock().unwrap().clone();
                    let fields = [("ip", watched.0), ("port", watched.1.to_string()), ("config-epoch", epoch.to_string())];
                    let fields: String = fields.iter().map(|(name, value)| bulk(name) + &bulk(value)).collect();
                    format!("*6\r\n{fields}*2\r\n{}{}", bulk(&primary.0), bulk(&primary.1.to_string()))
                } else {
                    continue;
                }
            }
            Some(switch) = async { listening.as_mut()?.recv().await.ok() } => {
                format!("*3\r\n{}{}{}", bulk("message"), bulk("+switch-master"), bulk(&switch))
            }
        };
        if stream.write_all(reply.as_bytes()).await.is_err() {
            return;
        }
    }
}

//! Links between the members of an etcd cluster, through this process: one member can be cut off
//! from the others while clients reach all of them.

use std::{
    io,
    net::{Ipv4Addr, TcpListener as Listener},
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional},
    net::{TcpListener, TcpStream},
    sync::watch,
};

/// The header in the first request of each connection between members, with the identifier of the
/// one that has opened it.
const HEADER: &str = "X-Server-From";
/// The largest number of bytes in which the header is looked for.
const HEAD: usize = 4096;

/// The links of a cluster. They end with the runtime.
#[derive(Debug, Default)]
pub(crate) struct Links(watch::Sender<Option<CutOff>>);

/// A member that is cut off.
#[derive(Debug)]
struct CutOff {
    member: usize,
    /// Its identifier, in hexadecimal digits.
    id: String,
}

impl Links {
    /// Opens a link to a port of a member, and returns its port.
    pub(crate) fn open(&self, member: usize, port: u16) -> io::Result<u16> {
        let listener = Listener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let own = listener.local_addr()?.port();
        listener.set_nonblocking(true)?;
        let listener = TcpListener::from_std(listener)?;
        let state = self.0.subscribe();
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                tokio::spawn(pass(near, member, port, state.clone()));
            }
        });
        Ok(own)
    }

    /// Makes the links from and to a member silent: no end learns of it.
    pub(crate) fn cut_off(&self, member: usize, id: String) {
        self.0.send_replace(Some(CutOff { member, id }));
    }

    /// Closes the silent connections. New ones pass.
    pub(crate) fn join(&self) {
        self.0.send_replace(None);
    }
}

/// Passes the bytes of a connection on, until it is cut.
async fn pass(
    mut near: TcpStream,
    member: usize,
    port: u16,
    mut state: watch::Receiver<Option<CutOff>>,
) -> io::Result<()> {
    let mut head = vec![0; HEAD];
    let length = near.read(&mut head).await?;
    head.truncate(length);
    let text = String::from_utf8_lossy(&head);
    let opener = text
        .lines()
        .find_map(|line| line.strip_prefix(HEADER)?.strip_prefix(": "));
    let is_cut = |state: &Option<CutOff>| {
        let cut = state.as_ref();
        cut.is_some_and(|it| it.member == member || opener == Some(&it.id))
    };
    let mut far = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await?;
    tokio::select! {
        biased;
        _ = state.wait_for(is_cut) => {}
        ended = async {
            far.write_all(&head).await?;
            copy_bidirectional(&mut near, &mut far).await
        } => return ended.map(drop),
    }
    let _ = state.wait_for(|state| !is_cut(state)).await;
    Ok(())
}

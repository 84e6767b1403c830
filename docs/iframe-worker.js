// Search runs in a Worker, which browsers refuse to pages that are opened from disk. There, an
// iframe runs its script instead, on this site's own files alone.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      const load = (source) =>
        new Promise((done, fail) => {
          const script = frame.contentDocument.createElement("script");
          Object.assign(script, { src: source, onload: done, onerror: fail });
          frame.contentDocument.body.append(script);
        });
      this.inside.importScripts = async (...sources) => {
        for (const source of sources) await load(source);
      };
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = load(url);
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
